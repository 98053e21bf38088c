//! `clary connect`: settings for a known client, and whether its dialect works here.

mod clients;
mod dialects;

use clap::Args;
use serde_json::{Value, json};

use self::clients::{CLIENTS, Known};
use self::dialects::Tried;
use crate::client::{self, Client};
use crate::error::{Failure, Result};
use crate::output::Output;
use crate::table::Table;

/// `connect`.
#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// Name of the client [default: list them]
    pub(crate) client: Option<String>,
    /// The server; CLARY_API_KEY is its key
    #[arg(long, value_name = "URL", default_value = client::URL)]
    pub(crate) url: String,
    /// Only try the dialect; without a server no settings are printed
    #[arg(long)]
    pub(crate) check: bool,
}

/// Tokens of context that are assumed where no server says.
const CONTEXT: u64 = 32768;

/// Reads as a key where the server has none: most clients insist on one.
const NO_KEY: &str = "none";

/// What a server says about its model.
struct Model {
    id: String,
    context: u64,
    /// Whether it takes pictures.
    sees: bool,
}

/// Prints settings, then tries the dialect. Without a client, lists them.
pub(crate) fn connect(args: &ConnectArgs, output: &Output) -> Result {
    let Some(name) = &args.client else { return list(output) };
    let known = CLIENTS.iter().find(|known| known.name == name).ok_or_else(|| {
        let names: Vec<&str> = CLIENTS.iter().map(|known| known.name).collect();
        Failure::usage(format!("{name}: no such client")).hint(format!("known: {}", names.join(", ")))
    })?;
    let client = Client::new(&args.url)?;
    let found = model(&client);
    let is_assumed = found.is_err();
    if args.check
        && let Err(failure) = found
    {
        return Err(failure);
    }
    let assumed = Model { id: "MODEL".to_owned(), context: CONTEXT, sees: false };
    let settings = filled(known, &client, found.as_ref().unwrap_or(&assumed));
    if !output.json && !args.check {
        if is_assumed {
            output.note(&format!(
                "# No server answered at {}: MODEL stands for the name of its model, and {CONTEXT} tokens of \
                 context are assumed.",
                client.base
            ))?;
        }
        // Beside the settings, which may go into a file.
        output.note(&format!("# {}, {}", known.about, known.place))?;
        output.out(&format!("{settings}\n"))?;
    }
    // Without a server the settings are worth having all the same.
    let tried = found.and_then(|model| known.dialect.try_out(&client, &model.id));
    if output.json {
        output.document(&document(known, &settings, is_assumed, &tried))?;
    }
    let Tried { whole, first, stream } = tried?;
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    Ok(output.note(&format!(
        "ok: {} at {}: whole reply {:.0} ms, stream {:.0} ms, its first event {:.0} ms",
        known.dialect.name(),
        client.base,
        ms(whole),
        ms(stream),
        ms(first)
    ))?)
}

fn list(output: &Output) -> Result {
    if output.json {
        let row = |known: &Known| json!({"client": known.name, "dialect": known.dialect.name()});
        return Ok(output.document(&Value::Array(CLIENTS.iter().map(row).collect()))?);
    }
    let mut table = Table::new("<<<");
    for known in &CLIENTS {
        table.row([known.name, known.about, known.dialect.name()]);
    }
    Ok(output.out(&table.text())?)
}

fn model(client: &Client) -> Result<Model> {
    let models = client.get("/v1/models")?.ok("/v1/models")?.json();
    let first = &models["data"][0];
    let id = first["id"].as_str().ok_or_else(|| {
        Failure::new(crate::error::Exit::Failure, format!("{}: /v1/models lists no model", client.base))
    })?;
    let context = first["max_model_len"].as_u64().unwrap_or(CONTEXT);
    let abilities = first["capabilities"].as_array();
    let sees = abilities.is_some_and(|abilities| abilities.iter().any(|ability| ability == "vision"));
    Ok(Model { id: id.to_owned(), context, sees })
}

fn filled(known: &Known, client: &Client, model: &Model) -> String {
    // A key is never printed: it would end up in a terminal's history.
    let key = if client.has_key() { "$CLARY_API_KEY" } else { NO_KEY };
    known
        .settings
        .replace("{url}", &client.base)
        .replace("{context}", &model.context.to_string())
        .replace("{output}", &(model.context / 2).to_string())
        .replace("{sees}", if model.sees { "true" } else { "false" })
        .replace("{modalities}", if model.sees { r#""text", "image""# } else { r#""text""# })
        .replace("{env_key}", if client.has_key() { "\nenv_key = \"CLARY_API_KEY\"" } else { "" })
        .replace("{key}", key)
        .replace("{model}", &model.id)
}

fn document(known: &Known, settings: &str, is_assumed: bool, tried: &Result<Tried>) -> Value {
    let ms = |time: std::time::Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    let test = match tried {
        Ok(tried) => json!({"ok": true, "whole_ms": ms(tried.whole), "stream_ms": ms(tried.stream),
            "first_event_ms": ms(tried.first)}),
        Err(failure) => json!({"ok": false, "error": failure.message}),
    };
    json!({"client": known.name, "dialect": known.dialect.name(), "place": known.place, "settings": settings,
        "assumed": is_assumed.then(|| json!({"model": "MODEL", "context": CONTEXT})), "test": test})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_client_has_its_settings_filled_in() {
        let client = Client::new("http://127.0.0.1:1/v1/").unwrap();
        let model = |sees| Model { id: "m".into(), context: 100, sees };
        for (known, sees) in CLIENTS.iter().flat_map(|known| [(known, false), (known, true)]) {
            let text = filled(known, &client, &model(sees));
            assert!(text.contains("http://127.0.0.1:1") && !text.contains(":1/v1/v1"), "{text}");
            for left in
                ["{url}", "{model}", "{context}", "{key}", "{output}", "{sees}", "{modalities}", "{env_key}"]
            {
                assert!(!text.contains(left), "{}: {left}", known.name);
            }
            if matches!(known.name, "opencode" | "zed" | "cline" | "aider") {
                let names = ["attachment\": true", "images\": true", "Images   true", "vision\": true"];
                assert_eq!(names.iter().any(|name| text.contains(name)), sees, "{text}");
            }
            if matches!(known.name, "opencode" | "zed") {
                assert!(serde_json::from_str::<Value>(&text).is_ok(), "{text}");
            }
            if known.name == "codex" {
                assert!(text.parse::<toml_edit::DocumentMut>().is_ok(), "{text}");
            }
        }
        assert_eq!(Client::new("localhost:8080/v1/").unwrap().base, "http://localhost:8080");
        for wrong in ["", "ftp://a", "http://", "a b", "http:/a"] {
            assert!(Client::new(wrong).is_err(), "{wrong}");
        }
    }
}
