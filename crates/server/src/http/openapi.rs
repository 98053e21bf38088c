//! The OpenAPI document, made from the types that are read and written.

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use utoipa::OpenApi;

use super::app::json as json_response;
use super::error::Dialect;
use super::settings::Settings;
use super::state::App;
use super::{chat, completions, messages, ollama, responses, routes};

#[derive(OpenApi)]
#[openapi(
    info(title = "Clary", description = "Inference of one model of the Qwen3.5-MoE family."),
    paths(
        chat::post,
        completions::post,
        messages::post,
        messages::count,
        responses::post,
        ollama::chat,
        ollama::generate,
        ollama::version,
        ollama::tags,
        ollama::ps,
        ollama::show,
        routes::models::list,
        routes::models::one,
        routes::tokens::tokenize,
        routes::tokens::detokenize,
        routes::tokens::info,
        routes::tokens::apply_template,
        routes::health::health,
        routes::health::ready,
        routes::metrics::metrics,
        routes::slots::slots,
        routes::props::props,
        routes::props::version,
        document,
    ),
    components(schemas(chat::ChatChunk, chat::DryRun))
)]
struct Document;

/// Routes whose answer may be a stream, and its type.
const STREAMED: [(&str, &str); 6] = [
    ("/v1/chat/completions", "text/event-stream"),
    ("/v1/completions", "text/event-stream"),
    ("/v1/messages", "text/event-stream"),
    ("/v1/responses", "text/event-stream"),
    ("/api/chat", "application/x-ndjson"),
    ("/api/generate", "application/x-ndjson"),
];

/// Errors of every route (`docs/api.md` 2.3).
const ANYWHERE: [u16; 5] = [401, 421, 431, 500, 503];
/// Errors of routes that read a body.
const OF_BODIES: [u16; 6] = [400, 404, 408, 413, 415, 429];

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "Operation", responses((status = 200, body = Object)))]
pub(crate) async fn document(State(app): State<App>) -> Response {
    json_response(&completed(app.settings()))
}

/// The document of the routes that are served, with what is the same for many of them: streams and errors.
fn completed(settings: &Settings) -> Value {
    let mut document = serde_json::to_value(Document::openapi()).expect("own types have a JSON form");
    for dialect in [Dialect::OpenAi, Dialect::Anthropic, Dialect::Ollama] {
        document["components"]["schemas"][error_name(dialect)] = error_schema(dialect);
    }
    let paths = document["paths"].as_object_mut().expect("a document has paths");
    paths.retain(|path, _| match path.as_str() {
        "/v1/responses" => settings.responses,
        path => match Dialect::of(path) {
            Dialect::OpenAi => true,
            Dialect::Anthropic => settings.anthropic,
            Dialect::Ollama => settings.ollama,
        },
    });
    for (path, methods) in paths.iter_mut() {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            let answers = &mut operation["responses"];
            add_errors(path, method, answers);
            if let Some((_, kind)) = STREAMED.iter().find(|(streamed, _)| streamed == path) {
                answers["200"]["content"][kind] = json!({"schema": {"type": "string"}});
            }
        }
    }
    overlapping(&mut document);
    let reply = &mut document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"];
    let dry_run = json!({"$ref": "#/components/schemas/DryRun"});
    let schema = reply["application/json"]["schema"].take();
    reply["application/json"]["schema"] = json!({"anyOf": [schema, dry_run]});
    document
}

/// Makes `anyOf` of every `oneOf`: an empty list fits more than one kind of list.
fn overlapping(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            if let Some(branches) = members.remove("oneOf") {
                members.insert("anyOf".to_owned(), branches);
            }
            members.values_mut().for_each(overlapping);
        }
        Value::Array(items) => items.iter_mut().for_each(overlapping),
        _ => {}
    }
}

/// Adds the errors that a route may answer with and does not name itself.
fn add_errors(path: &str, method: &str, answers: &mut Value) {
    let schema = format!("#/components/schemas/{}", error_name(Dialect::of(path)));
    let of_bodies = OF_BODIES.iter().filter(|_| method == "post");
    // Fields that exist in other servers.
    let foreign = (path == "/v1/completions").then_some(&501);
    for status in ANYWHERE.iter().chain(of_bodies).chain(foreign) {
        let answer = &mut answers[status.to_string()];
        if answer.is_null() {
            *answer = json!({"description": "An error"});
        }
        if answer.get("content").is_none() {
            answer["content"] = json!({"application/json": {"schema": {"$ref": schema}}});
        }
    }
    if let Some(answer) = answers.get_mut("404").filter(|answer| answer.get("content").is_none()) {
        answer["content"] = json!({"application/json": {"schema": {"$ref": schema}}});
    }
}

fn error_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::OpenAi => "OpenAiError",
        Dialect::Anthropic => "AnthropicError",
        Dialect::Ollama => "OllamaError",
    }
}

fn error_schema(dialect: Dialect) -> Value {
    let text = json!({"type": "string"});
    let object = |properties: Value| {
        let names: Vec<&String> =
            properties.as_object().into_iter().flatten().map(|(name, _)| name).collect();
        json!({"type": "object", "required": names, "properties": properties})
    };
    match dialect {
        Dialect::OpenAi => object(json!({"error": object(json!({"message": text, "type": text,
            "param": {"type": ["string", "null"]}, "code": text}))})),
        Dialect::Anthropic => object(json!({"type": {"const": "error"}, "request_id": text,
            "error": object(json!({"type": text, "message": text}))})),
        Dialect::Ollama => object(json!({"error": text})),
    }
}
