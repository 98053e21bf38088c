//! The application on a socket: connections with their limits in number and time, and the end in good order.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};
use tower::ServiceExt;

use super::app::app;
use super::drain::Phase;
use super::error::{ApiError, Code, Dialect};
use super::flow::Hangup;
use super::limits::{HEADER_BUFFER, Limits};
use super::settings::Bind;
use super::state::App;

/// Pause after a failed accept: a full table of files empties no faster for being asked.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time in which cut replies may tell their clients.
const CUT_TIME: Duration = Duration::from_secs(2);
/// Time in which a closed connection may still send what is thrown away: closing earlier would let the system
/// drop the answer before the client has read it.
const LINGER_TIME: Duration = Duration::from_millis(500);

/// A bound socket.
#[derive(Debug)]
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A socket file, which is removed in the end.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds. A socket file that no process listens at is replaced; a file of another kind is left alone, and
    /// binding to its path fails.
    pub async fn bind(bind: &Bind) -> io::Result<Self> {
        match bind {
            Bind::Tcp(address) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
            Bind::Unix(path) => {
                let socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
                let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
                if socket && UnixStream::connect(path).await.is_err_and(refused) {
                    std::fs::remove_file(path)?;
                }
                Ok(Self::Unix(UnixListener::bind(path)?, path.clone()))
            }
        }
    }

    /// Where it listens: `http://ADDRESS`, or `unix:PATH`.
    pub fn address(&self) -> String {
        match self {
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => format!("http://{address}"),
                Err(_) => "http://unknown".to_owned(),
            },
            Self::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Small chunks shall leave at once.
                stream.set_nodelay(true)?;
                Ok(Socket::Tcp(stream))
            }
            Self::Unix(listener, _) => Ok(Socket::Unix(listener.accept().await?.0)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Serves until the first order from `orders`; then takes nothing new, lets running replies go on for the
/// drain time, ends them with an error, and returns. A second order returns at once.
pub async fn serve(listener: Listener, state: App, mut orders: Receiver<()>) {
    let router = app(state.clone());
    let limits = state.settings().limits.clone();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(socket) if connections.len() < limits.connections => {
                    connections.spawn(connection(socket, router.clone(), state.clone(), limits.clone()));
                }
                Ok(socket) => drop(socket),
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
            _ = orders.recv() => break,
        }
    }
    drop(listener);
    state.drain().advance(Phase::Draining);
    let drained = async {
        let all = async |connections: &mut JoinSet<()>| while connections.join_next().await.is_some() {};
        if timeout(state.settings().drain_timeout, all(&mut connections)).await.is_err() {
            state.drain().advance(Phase::Cut);
            // What is left after this is not reading; dropping the set ends it.
            let _ = timeout(CUT_TIME, all(&mut connections)).await;
        }
    };
    tokio::select! {
        () = drained => {}
        Some(()) = orders.recv() => {}
    }
}

async fn connection(socket: Socket, router: Router, state: App, limits: Limits) {
    let line = Line {
        socket: Arc::new(Mutex::new(socket)),
        asking: Arc::new(AtomicBool::new(false)),
        write_time: limits.write_time,
        blocked: None,
    };
    let (socket, asking) = (line.socket.clone(), line.asking.clone());
    let hangup = Hangup::default();
    let service = service_fn(|request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(hangup.clone());
        router.clone().oneshot(request)
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_time).max_buf_size(HEADER_BUFFER);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(line), service));
    let mut closing = false;
    let result = loop {
        tokio::select! {
            result = connection.as_mut() => break result,
            () = state.drain().reached(Phase::Draining), if !closing => closing = true,
            () = hangup.0.notified(), if !closing => closing = true,
        }
        connection.as_mut().graceful_shutdown();
    };
    let mut rest = Shared(socket);
    if result.is_err_and(|error| error.is_timeout()) && asking.load(Ordering::Relaxed) {
        // Whoever asks this slowly may be gone.
        let _ = rest.write_all(header_timeout().as_bytes()).await;
    }
    let _ = rest.shutdown().await;
    let _ = timeout(LINGER_TIME, discard(&mut rest)).await;
}

/// The answer to headers that never became whole. There is no request yet, so no other layer can write it.
fn header_timeout() -> String {
    let error = ApiError::new(Code::Timeout, "the headers did not come in time");
    let body = error.body(Dialect::OpenAi, "").to_string();
    let length = body.len();
    format!(
        "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
}

async fn discard(rest: &mut Shared) {
    let mut bytes = [0; 4096];
    while rest.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
}

/// A connected socket.
#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A socket that outlives the connection's state machine, for a last word.
struct Shared(Arc<Mutex<Socket>>);

impl Shared {
    fn with<T>(&self, work: impl FnOnce(Pin<&mut (dyn Stream + Unpin)>) -> T) -> T {
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *socket {
            Socket::Tcp(stream) => work(Pin::new(stream)),
            Socket::Unix(stream) => work(Pin::new(stream)),
        }
    }
}

/// Both directions.
trait Stream: AsyncRead + AsyncWrite {}

impl<S: AsyncRead + AsyncWrite> Stream for S {}

impl AsyncRead for Shared {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_read(context, buf))
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.with(|stream| stream.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_shutdown(context))
    }
}

/// A socket whose writes may not stand still for ever.
struct Line {
    socket: Arc<Mutex<Socket>>,
    /// Whether bytes of a request came since the last answer.
    asking: Arc<AtomicBool>,
    write_time: Duration,
    /// Runs while the client reads nothing.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl Line {
    fn shared(&self) -> Shared {
        Shared(self.socket.clone())
    }
}

impl AsyncRead for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = self.shared().with(|stream| stream.poll_read(context, buf));
        if buf.filled().len() > before {
            self.asking.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = self.shared().with(|stream| stream.poll_write(context, bytes));
        if result.is_ready() {
            self.asking.store(false, Ordering::Relaxed);
            self.blocked = None;
            return result;
        }
        let time = self.write_time;
        let blocked = self.blocked.get_or_insert_with(|| Box::pin(sleep(time)));
        match blocked.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared().with(|stream| stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared().with(|stream| stream.poll_shutdown(context))
    }
}
