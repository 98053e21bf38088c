//! The chat template of a model folder: messages to a prompt.
//!
//! The template runs in minijinja with Python's string and dict methods, as transformers runs it in Jinja:
//! `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, Python's `tojson`. It
//! has no loader and no I/O, and a bound on work and output. A value can nest one level for each unit of
//! work, and printing, comparing and dropping it recurse: a rendering has a stack of its own that bears that.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value as Any};
use serde_json::{Map, Value};

use crate::error::TextError;
use crate::nesting::{self, Late};
use crate::{files, namespaces, python};

/// Largest template, and largest `tokenizer_config.json`, bytes.
pub const TEMPLATE_BYTES_MAX: u64 = 16 << 20;
/// Work any rendering may do: about an instruction, or 64 bytes handled, per unit. Each value of the chat
/// adds [`RENDER_FUEL_PER_VALUE`].
pub const RENDER_FUEL: u64 = 1_000_000;
/// Further work for each string, number, list and object of the chat and its tools.
pub const RENDER_FUEL_PER_VALUE: u64 = 400;
/// Most work of a rendering, however long the chat.
pub const RENDER_FUEL_MAX: u64 = 20_000_000;
/// Stack of a rendering for each unit of work: what one level of a nested value takes to print, with room.
const STACK_PER_FUEL: u64 = 1 << 10;
/// Stack of the rendering itself.
const STACK_BASE: u64 = 16 << 20;
/// Longest time of a rendering: there are operations whose time the fuel does not tell.
pub const RENDER_TIME_MAX: Duration = Duration::from_secs(60);
/// Longest rendered prompt, bytes.
pub const RENDER_BYTES_MAX: usize = 64 << 20;
/// Deepest nesting of macros and loops.
const RECURSION_MAX: usize = 128;
const NAME: &str = "chat";

/// A compiled chat template. Cheap to clone; safe to share between threads.
#[derive(Clone)]
pub struct ChatTemplate {
    parts: Arc<Parts>,
}

struct Parts {
    environment: Environment<'static>,
    source: String,
    digest: String,
    /// Names the template reads and does not set.
    variables: HashSet<String>,
    /// `bos_token` and the like, as transformers hands them to templates.
    constants: Map<String, Value>,
    /// Renderings that nobody waits for any more.
    late: Arc<Late>,
}

/// The message of `raise_exception`, carried through the template engine's error chain.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json` (a string, or a list
    /// of named ones of which `default` is taken).
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let config = files::read_if_there(&dir.join("tokenizer_config.json"), TEMPLATE_BYTES_MAX)?;
        let config: Value = match config {
            Some(data) => files::json("tokenizer_config.json", &data)?,
            None => Value::Null,
        };
        let path = dir.join("chat_template.jinja");
        let source = match files::read_if_there(&path, TEMPLATE_BYTES_MAX)? {
            Some(data) => String::from_utf8(data).map_err(|error| TextError::Json {
                file: "chat_template.jinja",
                detail: format!("not UTF-8: {error}"),
            })?,
            None => configured_template(&config)
                .ok_or_else(|| TextError::NoTemplate { dir: dir.to_owned() })?
                .to_owned(),
        };
        Self::new(source, special_texts(&config))
    }

    /// Compiles a template; `constants` are visible to it by name.
    pub fn new(source: String, constants: Map<String, Value>) -> Result<Self, TextError> {
        nesting::check(&source)?;
        namespaces::check(&source)?;
        nesting::with_stack(nesting::STACK_BYTES, || Self::compile(source, constants))?
    }

    fn compile(source: String, constants: Map<String, Value>) -> Result<Self, TextError> {
        let mut environment = environment();
        let syntax = |error: Error| TextError::TemplateSyntax {
            line: error.line().unwrap_or(0),
            detail: error.detail().map_or_else(|| error.to_string(), str::to_owned),
        };
        environment.add_template_owned(NAME, source.clone()).map_err(syntax)?;
        let template = environment.get_template(NAME).map_err(syntax)?;
        let variables = template.undeclared_variables(false);
        let digest = files::sha256_hex(source.as_bytes());
        let late = Arc::default();
        Ok(Self { parts: Arc::new(Parts { environment, source, digest, variables, constants, late }) })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.parts.source
    }

    /// SHA-256 of the template's text, lower-case hexadecimal.
    pub fn digest(&self) -> &str {
        &self.parts.digest
    }

    /// Whether the template reads this variable, such as `preserve_thinking`. One that it does not read has
    /// no effect.
    pub fn reads(&self, variable: &str) -> bool {
        self.parts.variables.contains(variable)
    }

    /// Runs the template over a context. `now` is in seconds since 1970, UTC.
    pub(crate) fn run(&self, mut context: Map<String, Value>, now: i64) -> Result<String, TextError> {
        for (name, value) in &self.parts.constants {
            context.entry(name.clone()).or_insert_with(|| value.clone());
        }
        context.insert(python::NOW.to_owned(), now.into());
        let values: u64 = context.values().map(count_values).sum();
        let fuel = (RENDER_FUEL + values.saturating_mul(RENDER_FUEL_PER_VALUE)).min(RENDER_FUEL_MAX);
        let stack = (STACK_BASE + fuel * STACK_PER_FUEL) as usize;
        let template = self.clone();
        let run = move || template.run_here(&context, fuel);
        let limit = TextError::TemplateLimit { what: "time", limit: RENDER_TIME_MAX.as_secs() };
        self.parts.late.within(RENDER_TIME_MAX, stack, run)?.unwrap_or(Err(limit))
    }

    /// Runs the template on the stack at hand.
    fn run_here(&self, context: &Map<String, Value>, fuel: u64) -> Result<String, TextError> {
        let mut environment = self.parts.environment.clone();
        environment.set_fuel(Some(fuel));
        let template = environment.get_template(NAME).map_err(|error| failure(error, fuel))?;
        let mut out = Bounded(Vec::new());
        let run = template.render_captured_to(Any::from(Serde(context)), &mut out);
        run.map_err(|error| failure(error, fuel))?;
        String::from_utf8(out.0).map_err(|error| TextError::TemplateFailed {
            line: 0,
            detail: format!("the output is not UTF-8: {error}"),
        })
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChatTemplate({} bytes, sha256:{})", self.source().len(), self.digest())
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the standard delimiters are valid"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_recursion_limit(RECURSION_MAX);
    environment.set_formatter(|out, state, value| match python::scalar(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("tojson", python::tojson);
    environment
        .add_filter("string", |value: Any| python::scalar(&value).unwrap_or_else(|| value.to_string()));
    environment.add_function("strftime_now", python::strftime_now);
    environment.add_function("raise_exception", |message: String| -> Result<Any, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, message.clone());
        Err(error.with_source(Raised(message)))
    });
    environment
}

fn configured_template(config: &Value) -> Option<&str> {
    match &config["chat_template"] {
        Value::String(text) => Some(text),
        Value::Array(list) => {
            let named = |name: &str| list.iter().find(|template| template["name"] == name);
            named("default").or(list.first())?["template"].as_str()
        }
        _ => None,
    }
}

/// `*_token` fields of the tokenizer's configuration: a string, or an object with `content`.
fn special_texts(config: &Value) -> Map<String, Value> {
    let fields = config.as_object().into_iter().flatten();
    let tokens = fields.filter(|(name, _)| name.ends_with("_token")).filter_map(|(name, value)| {
        let content = value.as_str().or_else(|| value["content"].as_str())?;
        Some((name.clone(), Value::from(content)))
    });
    tokens.collect()
}

/// A sink that refuses to grow past [`RENDER_BYTES_MAX`].
struct Bounded(Vec<u8>);

/// What [`Bounded`] says when it is full.
#[derive(Debug, thiserror::Error)]
#[error("output limit")]
struct Full;

impl std::io::Write for Bounded {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        if data.len() > RENDER_BYTES_MAX - self.0.len() {
            return Err(std::io::Error::other(Full));
        }
        self.0.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Values in a JSON document, itself among them.
fn count_values(value: &Value) -> u64 {
    1 + match value {
        Value::Array(items) => items.iter().map(count_values).sum(),
        Value::Object(fields) => fields.values().map(count_values).sum(),
        _ => 0,
    }
}

/// Tells refusals, limits and faults apart; an error inside a macro comes wrapped in others.
fn failure(error: Error, fuel: u64) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    let mut innermost = &error;
    while let Some(at) = cause {
        if let Some(Raised(message)) = at.downcast_ref::<Raised>() {
            return TextError::TemplateRaised { message: message.clone() };
        }
        let is_full = |io: &std::io::Error| io.get_ref().is_some_and(|inner| inner.is::<Full>());
        if at.downcast_ref::<std::io::Error>().is_some_and(is_full) {
            return TextError::TemplateLimit { what: "output", limit: RENDER_BYTES_MAX as u64 };
        }
        if let Some(inner) = at.downcast_ref::<Error>() {
            innermost = inner;
            if inner.kind() == ErrorKind::OutOfFuel {
                return TextError::TemplateLimit { what: "fuel", limit: fuel };
            }
        }
        cause = at.source();
    }
    TextError::TemplateFailed {
        line: innermost.line().unwrap_or(0),
        detail: innermost.detail().map_or_else(|| innermost.to_string(), str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(source: &str, context: Value) -> Result<String, TextError> {
        let template = ChatTemplate::new(source.to_owned(), Map::new())?;
        let Value::Object(context) = context else { panic!("a context is an object") };
        template.run(context, 0)
    }

    fn check(source: &str, context: Value, wanted: &str) {
        assert_eq!(run(source, context).unwrap(), wanted, "{source}");
    }

    #[test]
    fn values_print_as_in_python() {
        let x = json!({"a": "é<&'\"\n\u{1}", "b": [1, 5.0, null, true], "z": {}, "c": []});
        check(
            "{{ x | tojson }}",
            json!({"x": x}),
            r#"{"a": "é<&'\"\n\u0001", "b": [1, 5.0, null, true], "z": {}, "c": []}"#,
        );
        check(
            "{{ x | tojson(indent=2) }}",
            json!({"x": {"a": [1], "b": {}}}),
            "{\n  \"a\": [\n    1\n  ],\n  \"b\": {}\n}",
        );
        check("{{ x | tojson(ensure_ascii=true) }}", json!({"x": "é😀"}), r#""\u00e9\ud83d\ude00""#);
        check(
            "{{ x | tojson(separators=(',', ':'), sort_keys=true) }}",
            json!({"x": {"b": 1, "a": 2}}),
            r#"{"a":2,"b":1}"#,
        );
        check(
            "{{ true }} {{ none }} {{ x | string }} {{ 1e16 }}",
            json!({"x": false}),
            "True None False 1e+16",
        );
    }

    #[test]
    fn python_methods_and_extensions() {
        check("{{ 'a</think>b'.split('</think>')[-1].rstrip('b') ~ 'x'.upper() }}", json!({}), "X");
        check(
            "{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            json!({}),
            "1",
        );
        check("  {% if true %}\nx\n  {% endif %}\ny", json!({}), "x\ny");
        check("{{ strftime_now('%Y') }}", json!({}), "1970");
        check("{% for k, v in d.items() %}{{ k }}{% endfor %}", json!({"d": {"b": 1, "a": 2}}), "ba");
        check("{{ a.missing }}{{ '<b>' }}", json!({"a": {}}), "<b>");
    }

    #[test]
    fn failures_are_told_apart() {
        let raised = run("{% macro m() %}{{ raise_exception('no ' ~ 1) }}{% endmacro %}{{ m() }}", json!({}));
        assert!(matches!(raised, Err(TextError::TemplateRaised { message }) if message == "no 1"));
        assert!(matches!(run("\n{% if %}", json!({})), Err(TextError::TemplateSyntax { line: 2, .. })));
        assert!(matches!(
            run("\n{{ nothing() }}", json!({})),
            Err(TextError::TemplateFailed { line: 2, .. })
        ));
        let nested = "{% for i in range(9999) %}".repeat(3) + "{{ i }}" + &"{% endfor %}".repeat(3);
        assert!(matches!(run(&nested, json!({})), Err(TextError::TemplateLimit { what: "fuel", .. })));
        let doubling = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}\
            {% endfor %}{{ n.x }}";
        assert!(matches!(run(doubling, json!({})), Err(TextError::TemplateLimit { .. })));
        let long = "{% set x = 'y' * 33554432 %}{{ x }}{{ x }}{{ x }}";
        // With the fuel of a long chat, or that ends first.
        let chat = json!({"chat": vec![0; 10_000]});
        assert!(matches!(run(long, chat), Err(TextError::TemplateLimit { what: "output", .. })));
        assert!(run("{% include 'x' %}", json!({})).is_err());
        assert!(run("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", json!({})).is_err());
    }

    /// A list nested in itself as deep as the fuel goes, then dropped, printed, compared, joined and sorted.
    #[test]
    fn values_nested_at_run_time_do_not_overflow_the_stack() {
        for lists in [1, 64] {
            for (last, count) in [
                ("", 100_000_000),
                ("{{ n.x }}", 60_000),
                ("{{ n.x | string | length }}", 60_000),
                ("{{ n.x == n.y }}", 60_000),
                ("{{ [n.x] | join }}", 60_000),
                ("{{ [n.x, n.y] | sort | length }}", 60_000),
                ("{{ {n.x: 1} | length }}", 60_000),
                ("{{ n.x | tojson }}", 60_000),
                ("{{ [n.x, n.y] | unique | list | length }}", 60_000),
                ("{{ n.x in [n.y] }}", 60_000),
            ] {
                let nested = |name: &str| format!("{}n.{name}{}", "[".repeat(lists), "]".repeat(lists));
                let source = format!(
                    "{{% set n = namespace(x=[], y=[]) %}}{{% for i in range({count}) %}}{{% set n.x = {} %}}\
                     {{% set n.y = {} %}}{{% endfor %}}{last}",
                    nested("x"),
                    nested("y"),
                );
                // Done, out of fuel or refused: what matters is that it comes back.
                let _ = run(&source, json!({}));
            }
        }
        let grows =
            "{% set n = namespace(x='ab') %}{% for i in range(99999) %}{% set n.x = n.x ~ n.x %}{% endfor %}";
        assert!(matches!(run(grows, json!({})), Err(TextError::TemplateLimit { what: "fuel", .. })));
        let forever = "{% for i in range(99999999) %}{% endfor %}";
        assert!(matches!(
            run(forever, json!({})),
            Err(TextError::TemplateLimit { .. } | TextError::TemplateFailed { .. })
        ));
    }

    #[test]
    fn long_chats_have_fuel_for_every_message() {
        let source = "{% for m in messages %}{% for n in [1, 2, 3] %}{% if m.role == 'user' and m.content %}\
            {{ m.content | trim }}{% endif %}{% endfor %}{% endfor %}";
        let messages: Vec<Value> =
            (0..20_000).map(|i| json!({"role": "user", "content": i.to_string()})).collect();
        assert!(run(source, json!({"messages": messages})).is_ok());
    }

    #[test]
    fn chains_without_brackets_do_not_overflow_the_stack() {
        let chain = |first: &str, link: &str, last: &str, links: usize| {
            run(&format!("{first}{}{last}", link.repeat(links)), json!({}))
        };
        for (first, link, last) in [
            ("{{ ", "-", "1 }}"),
            ("{{ ", "not ", "1 }}"),
            ("{{ ", "1+", "1 }}"),
            ("{{ ", "1**", "1 }}"),
            ("{{ ", "1~", "1 }}"),
            ("{{ ", "1 and ", "1 }}"),
            ("{{ ", "1 if 0 else ", "1 }}"),
            ("{{ a", ".b", " }}"),
            ("{{ a", "[0]", " }}"),
            ("{{ a", "()", " }}"),
            ("{{ 1", "|abs", " }}"),
            ("{{ a", " is defined", " }}"),
            ("{% set a", ".b", " = 1 %}"),
            ("{% if 0 %}", "{% elif 0 %}", "{% endif %}"),
            ("{{ {'a': {}} ~ ", "-", "1 }}"),
            ("{{ 1 %} ", "-", "1 }}"),
        ] {
            let refused = chain(first, link, last, 100_000);
            assert!(matches!(refused, Err(TextError::TemplateSyntax { line: 1, .. })), "{link}: {refused:?}");
            // The longest chain that is let through: whether it runs is the template's affair.
            let code = link.bytes().filter(|byte| *byte != b' ').count();
            let links = if link.contains("elif") { nesting::ELIF_MAX } else { 8000 / code };
            let _ = chain(first, link, last, links);
        }
    }

    #[test]
    fn templates_from_a_configuration() {
        let text = |config: Value| configured_template(&config).map(str::to_owned);
        assert_eq!(text(json!({"chat_template": "a"})).as_deref(), Some("a"));
        let list = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
        assert_eq!(text(json!({"chat_template": list})).as_deref(), Some("d"));
        assert_eq!(text(json!({})), None);
        let texts =
            special_texts(&json!({"eos_token": "e", "pad_token": {"content": "p"}, "bos_token": null}));
        assert_eq!(Value::Object(texts), json!({"eos_token": "e", "pad_token": "p"}));
    }
}
