//! The HTTP side over the fake model, whose replies a script may set, and over the demo model.

#![allow(unreachable_pub, missing_docs, clippy::unwrap_used)]

mod abuse;
mod calls;
mod cancel;
mod chat;
mod coding_clients;
mod completions;
mod demo;
mod errors;
mod live;
mod logs;
mod made;
mod messages;
mod ollama;
mod page;
mod pictures;
mod progress;
mod receipts;
mod responses;
mod routes;
mod security;
mod streams;
mod structured;
mod support;
