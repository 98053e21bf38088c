//! The built-in page: its files, what surrounds them, and what is said where they are not.

use axum::body::Body;
use axum::http::StatusCode;
use serde_json::json;
use server::http::Typed;

use crate::support::{Server, Setup, request};

fn without_page() -> Server {
    Server::with(Setup { typed: Typed { page: false, ..Typed::default() }, ..Setup::default() })
}

/// Every file that the page or one of its modules names.
fn named(text: &str) -> Vec<String> {
    let quoted = text.split(['"', '\'']).filter(|word| word.starts_with("/ui/") || word.starts_with("./"));
    quoted.map(|word| word.replacen("./", "/ui/", 1)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_file_is_there() {
    let server = Server::new();
    let mut paths = vec!["/".to_owned()];
    let mut next = 0;
    while let Some(path) = paths.get(next).cloned() {
        let answer = server.get(&path).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}");
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        assert_eq!(answer.headers["cache-control"], "no-cache");
        for found in named(answer.text()) {
            if !paths.contains(&found) {
                paths.push(found);
            }
        }
        next += 1;
    }
    assert!(paths.len() > 20, "{paths:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_file_is_not_sent_again() {
    let server = Server::new();
    let first = server.get("/ui/main.js").await;
    let tag = first.headers["etag"].to_str().unwrap();
    let ask =
        |tag: &str| request("GET", "/ui/main.js").header("if-none-match", tag).body(Body::empty()).unwrap();
    let again = server.call(ask(tag)).await;
    assert_eq!((again.status, again.body.len()), (StatusCode::NOT_MODIFIED, 0));
    assert!(again.headers.contains_key("content-security-policy"));
    let other = server.call(ask("\"x\"")).await;
    assert_eq!((other.status, other.body), (StatusCode::OK, first.body));
}

/// A browser that fetches the page has no key yet; the page's calls need one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_needs_no_key_and_its_calls_do() {
    let typed = Typed { keys: vec!["k1".into()], ..Typed::default() };
    let server = Server::with(Setup { typed, ..Setup::default() });
    for path in ["/", "/ui/main.js", "/ui/base.css"] {
        assert_eq!(server.get(path).await.status, StatusCode::OK, "{path}");
    }
    for path in ["/props", "/slots", "/v1/models", "/ui/none.js", "/ui"] {
        assert_eq!(server.get(path).await.status, StatusCode::UNAUTHORIZED, "{path}");
    }
    let typed = Typed { keys: vec!["k1".into()], page: false, ..Typed::default() };
    let server = Server::with(Setup { typed, ..Setup::default() });
    assert_eq!(server.get("/").await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn left_out() {
    let server = without_page();
    for path in ["/", "/ui/main.js"] {
        assert_eq!(server.get(path).await.status, StatusCode::NOT_FOUND, "{path}");
    }
    assert!(server.get("/").await.text().contains("--no-ui"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paths_that_miss_a_route_say_which_is_meant() {
    let server = Server::new();
    let answer = server.post("/chat/completions", &json!({})).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert!(answer.text().contains("/v1/chat/completions is one"), "{}", answer.text());
    let answer = server.get("/v1/chat/completions").await;
    assert_eq!(
        (answer.status, &answer.headers["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"POST".parse().unwrap())
    );
    assert!(answer.text().contains("/v1/chat/completions has no method GET"), "{}", answer.text());
    let answer = server.post("/", &json!({})).await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
}
