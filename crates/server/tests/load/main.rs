//! Many clients, slow ones, ones that leave, and bodies at every limit: nothing is lost, every slot comes
//! back, memory and files stay as they were. Over the fake model; a binary of its own, so that what it
//! measures of the process is its own doing.

#![allow(unreachable_pub, missing_docs, dead_code, clippy::unwrap_used)]

mod limits;
#[path = "../http/made.rs"]
mod made;
mod pictures;
#[path = "../http/support.rs"]
mod support;

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinSet;

use crate::support::{Client, Live, Server, Setup, chat, comparable, joined, sse};

/// Clients that wait at a time.
const CLIENTS: usize = 64;
/// Connections that are broken off.
const CYCLES: usize = 1000;
/// Growth of resident memory that is not a leak: what allocators keep for later, bytes. One answer kept of
/// each broken cycle would be 20 times as much.
const GROWTH_MAX: u64 = 12 << 20;

/// One test at a time: they share the process that is measured.
static ALONE: Mutex<()> = Mutex::const_new(());

async fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().await
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The request of a client: prompts, seeds and lengths differ.
fn ask(client: usize, stream: bool) -> Value {
    let content = format!("Client {client} asks: {}", "word ".repeat(client * 7 % 90));
    chat(json!({"messages": [{"role": "user", "content": content}], "seed": client, "temperature": 1,
        "max_tokens": 8 + client % 17, "ignore_eos": true, "stream": stream}))
}

/// The message of an answer that was read to its end.
fn message(answer: &str, stream: bool) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    match stream {
        true => {
            let (events, done) = sse(&dechunked(body));
            assert!(done, "{body}");
            joined(&events)[0].clone()
        }
        false => comparable(&serde_json::from_str(body).unwrap())[0].clone(),
    }
}

/// The body without the sizes of its chunks.
fn dechunked(body: &str) -> String {
    let (mut rest, mut text) = (body, String::new());
    while let Some((size, more)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text.push_str(&more[..size]);
        rest = &more[size + 2..];
    }
    text
}

async fn closing(live: &Live, body: &Value) -> Client {
    let body = body.to_string();
    let mut client = live.connect().await;
    client
        .send(&format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))
        .await;
    client
}

/// 64 clients and 4 slots: every one gets the reply it would have got alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiting_clients_lose_nothing() {
    let _alone = alone().await;
    let alone = Server::with(Setup { slots: Some(1), ..Setup::default() });
    let server = Server::with(Setup { step: Duration::from_millis(1), ..Setup::default() });
    let live = server.listen().await;
    let mut waiting = Vec::new();
    for client in 0..CLIENTS {
        waiting.push(closing(&live, &ask(client, client % 2 == 0)).await);
    }
    server.until("many wait", |status| status.queued >= CLIENTS / 2).await;
    for (client, connection) in waiting.iter_mut().enumerate() {
        let answer = connection.rest().await;
        let expected = alone.post("/v1/chat/completions", &ask(client, false)).await.ok();
        assert_eq!(message(&answer, client % 2 == 0), comparable(&expected)[0], "client {client}");
    }
    server.idle().await;
    assert_eq!(server.engine.status().counters.finished as usize, CLIENTS);
    assert_eq!(server.engine.status().counters.failed, 0);
}

/// Readers that take one byte at a time, or none for long, hold up nobody else and get all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_readers_hold_up_nobody() {
    let _alone = alone().await;
    let server = Server::with(Setup { step: Duration::from_millis(1), ..Setup::default() });
    let live = server.listen().await;
    let mut slow = Vec::new();
    for client in 0..16 {
        slow.push(closing(&live, &ask(client, true)).await);
    }
    let start = tokio::time::Instant::now();
    for client in 0..16 {
        message(&closing(&live, &ask(100 + client, false)).await.rest().await, false);
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    server.idle().await;
    for (client, connection) in slow.iter_mut().enumerate() {
        let expected = server.post("/v1/chat/completions", &ask(client, false)).await.ok();
        assert_eq!(message(&connection.rest().await, true), comparable(&expected)[0], "client {client}");
    }
}

/// One way to break off, told by a number.
async fn broken_cycle(live: &Live, cycle: usize) {
    let body = ask(cycle % 40, cycle.is_multiple_of(2)).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let mut client = live.connect().await;
    match cycle % 6 {
        0 => {}
        1 => client.send(&head[..40]).await,
        2 => client.send(&format!("{head}{}", &body[..body.len() / 2])).await,
        3 => client.send(&format!("{head}{body}")).await,
        4 => {
            client.send(&format!("{head}{body}")).await;
            tokio::time::sleep(Duration::from_millis(cycle as u64 % 13)).await;
        }
        _ => {
            client.send(&format!("{head}{body}")).await;
            client.until("HTTP/1.1 200").await;
        }
    }
}

async fn broken_cycles(live: &std::sync::Arc<Live>, from: usize, count: usize) {
    let mut tasks = JoinSet::new();
    for worker in 0..8 {
        let live = live.clone();
        tasks.spawn(async move {
            for cycle in (from + worker..from + count).step_by(8) {
                broken_cycle(&live, cycle).await;
            }
        });
    }
    tasks.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_clients_that_leave_leave_nothing_behind() {
    let _alone = alone().await;
    let server = Server::with(Setup { step: Duration::from_micros(300), ..Setup::default() });
    let live = std::sync::Arc::new(server.listen().await);
    // The first ones fill what is kept on purpose: caches, threads, the allocator's pools.
    broken_cycles(&live, 0, CYCLES / 2).await;
    server.idle().await;
    let (memory, files) = (resident(), open_files());
    broken_cycles(&live, CYCLES / 2, CYCLES).await;
    server.idle().await;
    let grown = resident().saturating_sub(memory);
    assert!(grown <= GROWTH_MAX, "{grown} bytes more after {CYCLES} cycles");
    // Closed connections give their file back once the server has seen the end.
    for _ in 0..1000 {
        if open_files() <= files + 8 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(open_files() <= files + 8, "{} files for {files}", open_files());
    let slots = server.get("/slots").await.ok();
    assert!(slots.as_array().unwrap().iter().all(|slot| slot["state"] == "idle"), "{slots}");
    // Whoever comes next is served as if nothing had been.
    let fresh = Server::new();
    let expected = fresh.post("/v1/chat/completions", &ask(3, false)).await.ok();
    let found = server.post("/v1/chat/completions", &ask(3, false)).await.ok();
    assert_eq!(comparable(&found), comparable(&expected));
}
