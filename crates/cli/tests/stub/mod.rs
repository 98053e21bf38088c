//! A hub on this machine that answers as it is told, for the tests of `pull`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A request that came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Path and query.
    pub(crate) path: String,
    /// Headers, names in lower case.
    headers: Vec<(String, String)>,
}

impl Seen {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Where a range begins.
    pub(crate) fn start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// An answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Send only so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// Then keep the connection open and say nothing until the client leaves.
    pub(crate) hang: bool,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(crate) fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..Self::status(200) }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    pub(crate) fn cut(self, bytes: usize) -> Self {
        Self { cut: Some(bytes), ..self }
    }

    pub(crate) fn hang(self) -> Self {
        Self { hang: true, ..self }
    }

    /// A file as a good hub sends it: from where the range begins, if the file is still the same.
    pub(crate) fn file(seen: &Seen, bytes: &[u8], tag: &str) -> Self {
        let is_same = seen.header("if-range").is_none_or(|wanted| wanted == tag);
        match seen.start().filter(|start| is_same && *start < bytes.len()) {
            Some(start) => {
                let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
                let rest = Self { body: bytes[start..].into(), ..Self::status(206) };
                rest.with("content-range", range).with("etag", tag)
            }
            None => Self::ok(bytes).with("etag", tag),
        }
    }
}

/// Answers each request.
type Handler = dyn Fn(&Seen) -> Reply + Send + Sync;

/// The hub. Its threads end with the test process.
pub(crate) struct Stub {
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Stub {
    /// Starts a hub.
    pub(crate) fn start(handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it has an address"));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (known, handler): (_, Arc<Handler>) = (seen.clone(), Arc::new(handler));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (known, handler) = (known.clone(), handler.clone());
                // A client that leaves is a part of many tests.
                std::thread::spawn(move || drop(serve(stream, &known, &*handler)));
            }
        });
        Self { url, seen }
    }

    /// All requests so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no test panics in it").clone()
    }
}

fn serve(stream: TcpStream, known: &Mutex<Vec<Seen>>, handler: &Handler) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let seen = Seen { path, headers };
    known.lock().expect("no test panics in it").push(seen.clone());
    let reply = handler(&seen);
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    head += &format!("content-length: {}\r\n", reply.body.len());
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut stream = stream;
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    stream.write_all(&reply.body[..reply.cut.unwrap_or(reply.body.len())])?;
    stream.flush()?;
    if reply.hang {
        let _ = reader.read(&mut [0]);
    }
    Ok(())
}
