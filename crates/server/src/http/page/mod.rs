//! The built-in page (`docs/api.md` 7, `GET /`): files of this folder, embedded in the program.
//!
//! The files hold no data, so they need no key; everything that the page shows it asks for over the API, with
//! the key that its user types. The policy lets the page load and call nothing but this server, and run no
//! script and no style that is not one of these files.

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

use super::error::{ApiError, Code, quoted};
use super::ids::hex;
use super::state::App;

/// What a page of this server may do.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// One file of the page.
struct Asset {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

macro_rules! asset {
    ($path:literal, $kind:expr, $file:literal) => {
        Asset { path: $path, kind: $kind, bytes: include_bytes!(concat!("assets/", $file)) }
    };
}

/// Every file of `assets/`; a test holds the folder against this list.
const ASSETS: &[Asset] = &[
    asset!("/", HTML, "index.html"),
    asset!("/ui/icon.svg", PICTURE, "icon.svg"),
    asset!("/ui/base.css", STYLE, "base.css"),
    asset!("/ui/layout.css", STYLE, "layout.css"),
    asset!("/ui/thread.css", STYLE, "thread.css"),
    asset!("/ui/dialogs.css", STYLE, "dialogs.css"),
    asset!("/ui/early.js", SCRIPT, "early.js"),
    asset!("/ui/main.js", SCRIPT, "main.js"),
    asset!("/ui/dom.js", SCRIPT, "dom.js"),
    asset!("/ui/theme.js", SCRIPT, "theme.js"),
    asset!("/ui/api.js", SCRIPT, "api.js"),
    asset!("/ui/words.js", SCRIPT, "words.js"),
    asset!("/ui/store.js", SCRIPT, "store.js"),
    asset!("/ui/settings.js", SCRIPT, "settings.js"),
    asset!("/ui/form.js", SCRIPT, "form.js"),
    asset!("/ui/request.js", SCRIPT, "request.js"),
    asset!("/ui/chat.js", SCRIPT, "chat.js"),
    asset!("/ui/thread.js", SCRIPT, "thread.js"),
    asset!("/ui/message.js", SCRIPT, "message.js"),
    asset!("/ui/tools.js", SCRIPT, "tools.js"),
    asset!("/ui/composer.js", SCRIPT, "composer.js"),
    asset!("/ui/pictures.js", SCRIPT, "pictures.js"),
    asset!("/ui/sidebar.js", SCRIPT, "sidebar.js"),
    asset!("/ui/meter.js", SCRIPT, "meter.js"),
    asset!("/ui/dialogs.js", SCRIPT, "dialogs.js"),
    asset!("/ui/shortcuts.js", SCRIPT, "shortcuts.js"),
    asset!("/ui/blocks.js", SCRIPT, "blocks.js"),
    asset!("/ui/inline.js", SCRIPT, "inline.js"),
    asset!("/ui/render.js", SCRIPT, "render.js"),
];

/// Whether a path is a file of the page, which needs no key.
pub(crate) fn is_asset(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

/// Routes of the page's files.
pub(crate) fn routes() -> Router<App> {
    ASSETS.iter().fold(Router::new(), |router, asset| {
        let tag = tag(asset.bytes);
        let answer = move |headers: HeaderMap| std::future::ready(answer(asset, &tag, &headers));
        router.route(asset.path, get(answer))
    })
}

/// A browser keeps a file and asks each time whether it is still the same.
fn answer(asset: &'static Asset, tag: &HeaderValue, headers: &HeaderMap) -> Response {
    let mut response = match headers.get(IF_NONE_MATCH) {
        Some(known) if known == tag => StatusCode::NOT_MODIFIED.into_response(),
        _ => Response::new(Body::from(asset.bytes)),
    };
    let own = [
        (CONTENT_TYPE, asset.kind),
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    let own = own.map(|(name, value)| (name, HeaderValue::from_static(value)));
    response.headers_mut().extend(own);
    response.headers_mut().insert(ETAG, tag.clone());
    response
}

fn tag(bytes: &[u8]) -> HeaderValue {
    let tag = format!("\"{}\"", hex(&Sha256::digest(bytes)[..12]));
    HeaderValue::from_str(&tag).expect("hex is plain")
}

/// What to say about a path that has no route: mostly a base URL with too much or too little in it.
pub(crate) fn no_route(path: &str, has_page: bool) -> ApiError {
    let shown = quoted(path);
    let message = match path {
        "/" | "/index.html" if !has_page => {
            "the page is left out (--no-ui); the API is under /v1, and /openapi.json lists its routes"
                .to_owned()
        }
        "/index.html" | "/ui" | "/ui/" => format!("no route {shown}; the page is at /"),
        "/v1" | "/v1/" => {
            format!(
                "{shown} is a base URL for clients and no route itself; try /v1/models or \
                 /v1/chat/completions"
            )
        }
        _ => match meant(path) {
            Some(meant) => format!("no route {shown}; {meant} is one. Check the client's base URL"),
            None => format!("no route {shown}; /openapi.json lists them"),
        },
    };
    ApiError::new(Code::NotFound, message)
}

/// A route that a path misses by its prefix or by a slash.
fn meant(path: &str) -> Option<String> {
    const UNDER_V1: [&str; 6] =
        ["chat/completions", "completions", "models", "messages", "messages/count_tokens", "responses"];
    let rest = path.trim_matches('/');
    let rest = UNDER_V1.iter().find(|route| rest == **route || rest.ends_with(&format!("v1/{route}")))?;
    let meant = format!("/v1/{rest}");
    (meant != path).then_some(meant)
}

/// A route that exists, asked for with another method.
pub(crate) fn wrong_method(path: &str, method: &Method) -> ApiError {
    let (path, method) = (quoted(path), quoted(method.as_str()));
    let message = format!("{path} has no method {method}; the {ALLOW} header names those it has");
    ApiError::new(Code::MethodNotAllowed, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, wanted: &str) {
        let message = no_route(path, true).message;
        assert!(message.contains(wanted), "{path}: {message}");
    }

    #[test]
    fn paths_that_miss_a_route() {
        check("/chat/completions", "/v1/chat/completions is one");
        check("/v1/v1/chat/completions", "/v1/chat/completions is one");
        check("/v1/chat/completions/", "/v1/chat/completions is one");
        check("/openai/v1/models", "/v1/models is one");
        check("/v1", "base URL");
        check("/index.html", "at /");
        check("/nothing", "/openapi.json");
        check("/xmodels", "/openapi.json");
        assert!(no_route("/", false).message.contains("--no-ui"));
    }

    #[test]
    fn every_file_is_served_and_small() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/http/page/assets");
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
        let mut files: Vec<String> = files.map(|name| name.into_string().unwrap()).collect();
        files.sort();
        let name = |asset: &Asset| match asset.path {
            "/" => "index.html".to_owned(),
            path => path.trim_start_matches("/ui/").to_owned(),
        };
        let mut served: Vec<String> = ASSETS.iter().map(name).collect();
        served.sort();
        assert_eq!(files, served);
        for asset in ASSETS {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            assert!(text.lines().count() <= 600, "{}", asset.path);
            let long = text.lines().find(|line| line.chars().count() > 110);
            assert_eq!(long, None, "{}", asset.path);
        }
    }

    /// What the policy would refuse in a browser is refused here already.
    #[test]
    fn nothing_inline_and_nothing_from_outside() {
        for asset in ASSETS {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            for word in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=\""]
            {
                assert!(!text.contains(word), "{} has {word}", asset.path);
            }
            let outside = text.replace("http://www.w3.org/", "");
            for word in ["src=\"http", "href=\"http", "url(http", "from 'http", "import('", "//cdn"] {
                assert!(!outside.contains(word), "{} has {word}", asset.path);
            }
        }
    }
}
