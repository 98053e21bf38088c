//! Keys, hosts, browsers, ids (`docs/api.md` 2.2).

use axum::body::Body;
use serde_json::json;
use server::http::Typed;

use crate::support::{Server, Setup, chat, request};

fn with_keys(lines: &[&str], concurrency: Option<usize>) -> Server {
    let keys = lines.iter().map(|line| (*line).to_owned()).collect();
    Server::with(Setup {
        typed: Typed { keys, key_concurrency: concurrency, ..Typed::default() },
        ..Setup::default()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_but_the_probes_needs_a_key() {
    let server = with_keys(&["# keys", "alice: k1", "k2"], None);
    for path in ["/health", "/ready", "/"] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/slots", "/props", "/version", "/openapi.json", "/nothing"] {
        let answer = server.get(path).await;
        assert_eq!(answer.error(), (401, "invalid_api_key".into(), None), "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    let messages = server.post("/v1/messages", &json!({})).await;
    assert_eq!(messages.json()["error"]["type"], "authentication_error");
    assert_eq!(messages.json()["request_id"], messages.headers["x-request-id"].to_str().unwrap());
    for (name, value, wanted) in [
        ("authorization", "Bearer k1", 200),
        ("authorization", "Bearer k3", 401),
        ("authorization", "Bearer k", 401),
        ("x-api-key", "k2", 200),
        ("x-api-key", "alice: k1", 401),
    ] {
        let asked = request("GET", "/v1/models").header(name, value).body(Body::empty()).unwrap();
        assert_eq!(server.call(asked).await.status, wanted, "{name}: {value}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cache_is_divided_by_key_and_salt() {
    let server = with_keys(&["k1", "k2"], None);
    let cached = async |key: &str, salt: Option<&str>| {
        let asked = request("POST", "/v1/chat/completions").header("x-api-key", key);
        let body =
            chat(json!({"cache_salt": salt, "messages": [{"role": "system", "content": "word ".repeat(100)},
            {"role": "user", "content": "Hello"}]}));
        let asked =
            asked.header("content-type", "application/json").body(Body::from(body.to_string())).unwrap();
        server.call(asked).await.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("k1", None).await, 0);
    assert!(cached("k1", None).await > 0);
    assert_eq!(cached("k2", None).await, 0);
    assert_eq!(cached("k1", Some("a")).await, 0);
    assert_eq!(cached("k1", Some("b")).await, 0);
    assert!(cached("k1", Some("a")).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_on_loopback() {
    let server = Server::new();
    for (host, wanted) in [
        (Some("localhost:8080"), 200),
        (Some("127.0.0.1"), 200),
        (Some("[::1]:80"), 200),
        (Some("evil.example"), 421),
        (Some("localhost.evil.example"), 421),
        (None, 421),
    ] {
        let mut asked = axum::http::Request::builder().uri("/version");
        if let Some(host) = host {
            asked = asked.header("host", host);
        }
        let answer = server.call(asked.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, wanted, "{host:?}");
        if wanted == 421 {
            assert_eq!(answer.error().1, "wrong_host");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn browsers_get_what_they_were_allowed() {
    let asked = |method: &str, origin: &str| {
        let asked = request(method, "/v1/models").header("origin", origin);
        asked.header("access-control-request-method", "POST").body(Body::empty()).unwrap()
    };
    let closed = Server::new();
    let answer = closed.call(asked("GET", "https://a.example")).await;
    assert!(!answer.headers.contains_key("access-control-allow-origin"));
    assert_eq!(closed.call(asked("OPTIONS", "https://a.example")).await.status, 405);
    let mut typed = Typed { cors_origins: vec!["https://a.example".into()], ..Typed::default() };
    typed.keys = vec!["k".into()];
    let server = Server::with(Setup { typed, ..Setup::default() });
    let preflight = server.call(asked("OPTIONS", "https://a.example")).await;
    assert_eq!(preflight.status, 204);
    assert_eq!(preflight.headers["access-control-allow-origin"], "https://a.example");
    assert!(preflight.headers["access-control-allow-headers"].to_str().unwrap().contains("authorization"));
    // Libraries of clients send headers of their own, and pages read when to come again.
    let names = "authorization,content-type,x-stainless-lang,anthropic-dangerous-direct-browser-access";
    let mut library = asked("OPTIONS", "https://a.example");
    library.headers_mut().insert("access-control-request-headers", names.parse().unwrap());
    let preflight = server.call(library).await;
    assert_eq!(
        (preflight.status.as_u16(), &preflight.headers["access-control-allow-headers"]),
        (204, &names.parse().unwrap())
    );
    let told = preflight.headers["access-control-expose-headers"].to_str().unwrap().to_owned();
    assert!(told.contains("retry-after") && told.contains("x-request-id"), "{told}");
    for origin in ["https://b.example", "https://a.example.evil"] {
        let answer = server.call(asked("OPTIONS", origin)).await;
        assert_eq!(answer.status, 401);
        assert!(!answer.headers.contains_key("access-control-allow-origin"));
    }
    // An error must be readable by the page as well.
    let refused = server.call(asked("GET", "https://a.example")).await;
    assert_eq!(
        (refused.status.as_u16(), refused.headers.contains_key("access-control-allow-origin")),
        (401, true)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_response_has_an_id_and_a_version() {
    let server = Server::new();
    for (given, kept) in [("abc-1.2_3", true), ("a b", false), (&*"x".repeat(65), false)] {
        let asked = request("GET", "/nothing").header("x-request-id", given).body(Body::empty()).unwrap();
        let answer = server.call(asked).await;
        assert_eq!(answer.headers["x-request-id"] == given, kept, "{given}");
        assert_eq!(answer.headers["clary-version"], server::http::VERSION);
    }
    let (a, b) = (server.get("/version").await, server.get("/version").await);
    assert_ne!(a.headers["x-request-id"], b.headers["x-request-id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_may_have_so_many_requests() {
    let setup = Setup {
        typed: Typed { keys: vec!["k".into()], key_concurrency: Some(1), ..Typed::default() },
        step: std::time::Duration::from_millis(10),
        ..Setup::default()
    };
    let server = Server::with(setup);
    let ask = async || {
        let body = chat(json!({"ignore_eos": true, "max_tokens": 20})).to_string();
        let asked = request("POST", "/v1/chat/completions").header("x-api-key", "k");
        server.call(asked.header("content-type", "application/json").body(Body::from(body)).unwrap()).await
    };
    let second = async {
        server.until("one runs", |status| status.decoding == 1).await;
        ask().await
    };
    let (first, second) = tokio::join!(ask(), second);
    assert_eq!(first.status, 200);
    assert_eq!(second.error(), (429, "key_limit".into(), None));
    assert_eq!(ask().await.status, 200);
}
