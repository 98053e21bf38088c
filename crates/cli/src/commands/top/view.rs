//! Two looks at a server as lines and as JSON.

use serde_json::{Value, json};

use super::Look;
use crate::numbers::Numbers;
use crate::table::{self, Table};

/// Routes that `top` itself asks, and others that only look: they are no work.
const LOOKS: [&str; 7] = ["/v1/models", "/version", "/ready", "/slots", "/metrics", "/health", "/props"];

/// What changed between two looks, each second.
struct Rates {
    prompt: Option<f64>,
    generated: Option<f64>,
    requests: Option<f64>,
    /// Share of drafted tokens that were accepted; `None` where none was drafted.
    accepted: Option<f64>,
    /// Share of prompt tokens that came from the cache.
    cached: Option<f64>,
}

impl Rates {
    fn between(now: &Look, before: &Look) -> Self {
        let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
        let of =
            |value: &dyn Fn(&Numbers) -> Option<f64>| Some(value(&now.numbers)? - value(&before.numbers)?);
        let more = |name: &str| of(&|numbers| numbers.sum(name));
        let share = |part: Option<f64>, whole: Option<f64>| {
            let (part, whole) = (part?, whole?);
            (whole > 0.0).then_some(part / whole)
        };
        let prompt = more("vllm:prompt_tokens_total");
        let cached = of(&|numbers| numbers.labelled("clary_prompt_tokens_total", "source", "cached"));
        Self {
            prompt: prompt.map(|tokens| tokens / seconds),
            generated: more("vllm:generation_tokens_total").map(|tokens| tokens / seconds),
            requests: of(&|numbers| numbers.sum_but("clary_requests_total", "route", &LOOKS))
                .map(|requests| requests / seconds),
            accepted: share(more("clary_draft_accepted_total"), more("clary_draft_proposed_total")),
            cached: share(cached, prompt),
        }
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

fn rate(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.1}"))
}

fn bytes(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| table::bytes(value.max(0.0) as u64))
}

/// Lines for people.
pub(super) fn text(now: &Look, before: &Look, base: &str) -> String {
    let rates = Rates::between(now, before);
    let numbers = &now.numbers;
    let state = now.ready["reason"].as_str().unwrap_or("ready");
    let whole = |name: &str| numbers.sum(name).map_or("-".to_owned(), |value| format!("{value:.0}"));
    let mut lines = vec![
        format!("{}  {base}  {state}", now.title),
        format!(
            "running {}  waiting {}  last step {} ms ago  requests/s {}",
            now.ready["running"],
            now.ready["queued"],
            now.ready["last_step_age_ms"],
            rate(rates.requests)
        ),
        format!(
            "tok/s: written {}  prompt {}   drafts accepted {}   prompt from cache {}",
            rate(rates.generated),
            rate(rates.prompt),
            percent(rates.accepted),
            percent(rates.cached)
        ),
        format!(
            "kv {} tokens, {} of pages   cache {} of {}   process {}",
            whole("clary_kv_tokens"),
            percent(numbers.sum("vllm:kv_cache_usage_perc")),
            bytes(numbers.sum("clary_cache_bytes")),
            bytes(numbers.sum("clary_cache_limit_bytes")),
            bytes(numbers.sum("process_resident_memory_bytes"))
        ),
        memory(numbers),
        String::new(),
    ];
    let mut table = Table::new("><>>>>>>");
    table.row(["slot", "state", "prompt", "cached", "written", "tok/s", "accepted", "age"]);
    for slot in now.slots.as_array().into_iter().flatten() {
        table.row([
            &slot["id"].to_string(),
            slot["state"].as_str().unwrap_or("?"),
            &slot["n_prompt"].to_string(),
            &slot["n_cached"].to_string(),
            &slot["n_decoded"].to_string(),
            &rate(slot_rate(now, before, slot)),
            &percent(slot["draft_accept"].as_f64()),
            &format!("{:.1} s", slot["age_ms"].as_f64().unwrap_or(0.0) / 1e3),
        ]);
    }
    lines.push(table.text());
    lines.join("\n")
}

/// Memory of the device by use.
fn memory(numbers: &Numbers) -> String {
    let part = |name: &str| {
        Some(format!("{name} {}", bytes(Some(numbers.labelled("clary_device_memory_bytes", "use", name)?))))
    };
    let parts: Vec<String> =
        ["weights", "kv", "states", "scratch", "vision"].into_iter().filter_map(part).collect();
    match parts.is_empty() {
        true => "memory -".to_owned(),
        false => format!("memory {}", parts.join("  ")),
    }
}

/// Tokens a second of a slot whose request is the same as before.
fn slot_rate(now: &Look, before: &Look, slot: &Value) -> Option<f64> {
    let mut others = before.slots.as_array()?.iter();
    let other =
        others.find(|other| other["id"] == slot["id"] && other["request_id"] == slot["request_id"])?;
    let tokens = slot["n_decoded"].as_f64()? - other["n_decoded"].as_f64()?;
    slot["request_id"].is_string().then(|| tokens / (now.at - before.at).as_secs_f64().max(1e-3))
}

/// The same for programs, on one line.
pub(super) fn document(now: &Look, before: &Look) -> Value {
    let rates = Rates::between(now, before);
    let numbers = &now.numbers;
    json!({
        "ready": now.ready,
        "prompt_tokens_per_s": rates.prompt,
        "generated_tokens_per_s": rates.generated,
        "requests_per_s": rates.requests,
        "draft_accepted": rates.accepted,
        "prompt_cached": rates.cached,
        "kv_tokens": numbers.sum("clary_kv_tokens"),
        "cache_bytes": numbers.sum("clary_cache_bytes"),
        "process_bytes": numbers.sum("process_resident_memory_bytes"),
        "slots": now.slots,
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn rates_are_those_since_the_last_look() {
        let look = |seconds: u64, tokens: u64, decoded: u64| Look {
            at: Instant::now() + Duration::from_secs(seconds),
            title: "m".into(),
            ready: json!({"running": 1, "queued": 0, "last_step_age_ms": 3}),
            slots: json!([{"id": 0, "state": "decode", "n_prompt": 5, "n_cached": 2, "n_decoded": decoded,
                "request_id": "r", "draft_accept": null, "age_ms": 1500},
                {"id": 1, "state": "idle", "n_decoded": 0, "request_id": null}]),
            numbers: Numbers::read(&format!(
                "clary_requests_total{{route=\"/slots\",status=\"200\"}} {tokens}\n\
                 clary_requests_total{{route=\"/v1/messages\",status=\"200\"}} 7\n\
                 vllm:generation_tokens_total{{model_name=\"m\"}} {tokens}\n\
                 clary_draft_proposed_total {tokens}\n\
                 clary_draft_accepted_total{{position=\"0\"}} {}\nclary_cache_bytes 1024",
                tokens / 2
            )),
        };
        let text = text(&look(2, 120, 30), &look(0, 100, 10), "http://a");
        for wanted in [
            "ready",
            "requests/s 0.0",
            "written 10.0",
            "drafts accepted 50.0 %",
            "cache 1.0 KiB of -",
            "decode",
            "1.5 s",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        let row = text.lines().find(|line| line.contains("decode")).unwrap();
        assert!(row.contains("10.0"), "{row}");
        assert_eq!(document(&look(2, 100, 0), &look(0, 100, 0))["draft_accepted"], Value::Null);
    }
}
