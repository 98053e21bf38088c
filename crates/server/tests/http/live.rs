//! On a socket: slow clients, limits of connections, the end in good order.

use std::time::Duration;

use serde_json::json;
use server::http::{Bind, Listener};

use crate::support::{Server, Setup, chat, posted};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_requests_on_a_connection() {
    let server = Server::new();
    server.say("It is 95.");
    let live = server.listen().await;
    let mut client = live.connect().await;
    for _ in 0..3 {
        client.read.clear();
        client.post("/v1/chat/completions", &chat(json!({}))).await;
        client.until("total_tokens").await;
    }
    client.read.clear();
    client.post("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    client.until("[DONE]").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_headers_and_bodies() {
    let mut setup = Setup::default();
    setup.typed.limits.header_time = Duration::from_millis(100);
    setup.typed.limits.body_idle = Duration::from_millis(100);
    let server = Server::with(setup);
    let live = server.listen().await;
    let mut client = live.connect().await;
    client.send("GET /version HTTP/1.1\r\nhost: local").await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("\"timeout\""), "{answer}");
    let mut idle = live.connect().await;
    assert_eq!(idle.rest().await, "", "an idle connection is closed without a word");
    let mut client = live.connect().await;
    client
        .send(
            "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: 100\r\n\r\n{\"prompt\":",
        )
        .await;
    let answer = client.until("\"timeout\"").await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_too_long_for_any_buffer() {
    let server = Server::new();
    let live = server.listen().await;
    let mut client = live.connect().await;
    client
        .send(&format!("GET /version HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "a".repeat(200 << 10)))
        .await;
    assert!(client.until("\r\n").await.starts_with("HTTP/1.1 431 "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_connections_than_allowed() {
    let mut setup = Setup::default();
    setup.typed.limits.connections = 2;
    let server = Server::with(setup);
    let live = server.listen().await;
    let mut first = live.connect().await;
    let mut second = live.connect().await;
    for client in [&mut first, &mut second] {
        client.send("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        client.until("ok").await;
    }
    assert_eq!(live.connect().await.rest().await, "");
    drop(first);
    for _ in 0..200 {
        let mut third = live.connect().await;
        third.send("GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
        if third.rest().await.contains("ok") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("a place became free and was not used");
}

/// A client that does not read is given up, and its slot is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read() {
    let mut setup = Setup { step: Duration::from_millis(1), ..Setup::default() };
    setup.typed.limits.backlog = 4 << 10;
    let server = Server::with(setup);
    // Not over a socket: nobody knows how much the system would take for its client.
    let fields = json!({"stream": true, "ignore_eos": true, "max_tokens": 900});
    let mut unread = Vec::new();
    for _ in 0..4 {
        let request = posted("/v1/chat/completions", chat(fields.clone()).to_string());
        unread.push(server.unread(request).await);
    }
    server.until("all are given up", |status| status.counters.cancelled == 4).await;
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_in_good_order() {
    let server = Server::with(Setup { step: Duration::from_millis(10), ..Setup::default() });
    let live = server.listen().await;
    let mut running =
        live.post("/v1/chat/completions", &chat(json!({"stream": true, "ignore_eos": true}))).await;
    running.until("assistant").await;
    live.orders.send(()).await.unwrap();
    let ready = async {
        while server.get("/ready").await.status == 200 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.get("/ready").await.json()["reason"].clone()
    };
    assert_eq!(ready.await, "draining");
    assert_eq!(server.chat(json!({})).await.error(), (503, "draining".into(), None));
    let text = running.rest().await;
    let body = text.split_once("\r\n\r\n").unwrap().1;
    assert!(body.contains("[DONE]"), "the running reply was finished: {body}");
    tokio::time::timeout(Duration::from_secs(5), live.task).await.expect("the server ends").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_outlast_the_drain_time() {
    let mut setup = Setup { step: Duration::from_millis(10), ..Setup::default() };
    setup.typed.drain_timeout = Duration::from_millis(100);
    let server = Server::with(setup);
    let live = server.listen().await;
    let fields = |stream: bool| json!({"stream": stream, "ignore_eos": true, "max_tokens": 900});
    let mut streamed = live.post("/v1/chat/completions", &chat(fields(true))).await;
    let mut whole = live.post("/v1/chat/completions", &chat(fields(false))).await;
    server.until("both run", |status| status.decoding == 2).await;
    live.orders.send(()).await.unwrap();
    let text = streamed.rest().await;
    assert!(text.contains(r#""code":"draining""#) && !text.contains("[DONE]"), "{text}");
    let text = whole.rest().await;
    assert!(text.starts_with("HTTP/1.1 503 ") && text.contains(r#""code":"draining""#), "{text}");
    tokio::time::timeout(Duration::from_secs(5), live.task).await.expect("the server ends").unwrap();
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_order_ends_at_once() {
    let server = Server::with(Setup { step: Duration::from_millis(10), ..Setup::default() });
    let live = server.listen().await;
    let fields = json!({"stream": true, "ignore_eos": true, "max_tokens": 900});
    let mut client = live.post("/v1/chat/completions", &chat(fields)).await;
    client.until("assistant").await;
    live.orders.send(()).await.unwrap();
    live.orders.send(()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(2), live.task).await.expect("the server ends").unwrap();
    client.rest().await;
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_closes_the_stream() {
    let server = Server::with(Setup { step: Duration::from_millis(2), ..Setup::default() });
    let live = server.listen().await;
    let fields = json!({"stream": true, "ignore_eos": true, "max_tokens": 400});
    let mut client = live.post("/v1/chat/completions", &chat(fields)).await;
    client.until("assistant").await;
    server.faults.nan_in(5);
    let text = client.rest().await;
    assert!(text.contains("numerical_fault") && !text.contains("[DONE]"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_file() {
    let server = Server::new();
    let path = std::env::temp_dir().join(format!("clary-test-{}.socket", std::process::id()));
    let listener = Listener::bind(&Bind::Unix(path.clone())).await.unwrap();
    assert!(listener.address().starts_with("unix:"));
    assert!(Listener::bind(&Bind::Unix(path.clone())).await.is_err(), "somebody listens already");
    let (orders, received) = tokio::sync::mpsc::channel(2);
    let task = tokio::spawn(server::http::serve(listener, server.app.clone(), received));
    let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    let ask = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    tokio::io::AsyncWriteExt::write_all(&mut stream, ask).await.unwrap();
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text).await.unwrap();
    assert!(text.contains("\"ok\""), "{text}");
    drop(orders);
    tokio::time::timeout(Duration::from_secs(5), task).await.expect("the server ends").unwrap();
    assert!(!path.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_in_the_way_of_a_socket_is_kept() {
    let path = std::env::temp_dir().join(format!("clary-test-{}.notes", std::process::id()));
    std::fs::write(&path, "mine").unwrap();
    assert!(Listener::bind(&Bind::Unix(path.clone())).await.is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    std::fs::remove_file(&path).unwrap();
}
