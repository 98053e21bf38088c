//! Tool calls in the family's form, with arguments that follow their schema.
//!
//! `<tool_call>`, line break, `<function=NAME>`, for every parameter `<parameter=KEY>`, line break, value, line
//! break, `</parameter>`, then `</function>`, `</tool_call>`, a line break after each but the last. Strings stand
//! as they are, everything else as JSON, just as [`crate::ReplyParser`] reads them back.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

use super::error::{GrammarError, GrammarFault};
use super::pattern::{self, Dialect};
use super::schema::{self, Facts, Types};
use super::{Calls, formats, json_grammar};
use crate::message::Tool;
use crate::tokenizer::Tokenizer;

type Result<T> = std::result::Result<T, GrammarError>;

/// Longest chain of references and combinations of a string's schema.
const DEPTH_MAX: usize = 16;
/// What ends a parameter's value.
const VALUE_CLOSE: &str = r#""\n</parameter>\n""#;
/// Texts that the reader of a call would take for another type, or for the end of the value.
const COMMON_TERMINALS: &str = r#"
TAGGED: /(?s:.*)(?:<\/parameter>|<parameter=)(?s:.*)|(?s:.*)\r/
TYPED: /null|true|false|-?[0-9][0-9.eE+-]*|[ \t\r\n]*[\[{](?s:.*)/
FREE: /(?s:.*)/
"#;

/// Parts of a grammar under way.
#[derive(Default)]
pub(super) struct Parts {
    /// The answer without calls.
    pub(super) answer: Option<GrammarWithLexer>,
    /// What a reply with calls is made of, in the grammar's own language.
    rules: Option<String>,
    /// JSON values of parameters, named as the rules name them.
    values: Vec<GrammarWithLexer>,
}

impl Parts {
    /// All of it as one grammar.
    pub(super) fn into_grammar(self) -> TopLevelGrammar {
        let (rules, named) = match (self.rules, self.answer) {
            (None, Some(answer)) => return TopLevelGrammar::from_grammar(answer),
            (None, None) => ("start: /(?s:.*)/\n".to_owned(), None),
            (Some(rules), None) => (rules, None),
            (Some(rules), Some(answer)) => {
                (rules, Some(GrammarWithLexer { name: Some("answer".to_owned()), ..answer }))
            }
        };
        let mut grammars = vec![GrammarWithLexer::from_lark(rules)];
        grammars.extend(named);
        grammars.extend(self.values);
        TopLevelGrammar { grammars, max_tokens: None }
    }
}

/// Adds the calls.
pub(super) fn add(parts: &mut Parts, calls: &Calls, tokenizer: &Tokenizer) -> Result<()> {
    let mark = |text: &str| match tokenizer.control_id(text) {
        Some(id) => format!("<[{id}]>"),
        None => format!("{text:?}"),
    };
    let mut rules = Rules { text: String::new(), values: std::mem::take(&mut parts.values), names: 0 };
    let mut functions = Vec::new();
    for (index, tool) in calls.tools.iter().enumerate() {
        let body = match rules.strict(tool) {
            // Without `strict` nothing was promised about arguments: any will do where these cannot be had.
            Err(error) if !tool.strict && error.fault != GrammarFault::Invalid => rules.free(),
            body => body.map_err(|error| error.at_index(index))?,
        };
        functions.push(format!("\"<function={}>\\n\" {body}", tool.name));
    }
    let more = if calls.parallel { " (\"\\n\" call)*" } else { "" };
    let start = match (calls.required, &parts.answer) {
        (true, _) => "start: calls\n".to_owned(),
        (false, Some(_)) => "start: @answer | calls\n".to_owned(),
        (false, None) if calls.parallel => "start: TEXT? (call TEXT?)*\n".to_owned(),
        (false, None) => "start: TEXT? (call TEXT?)?\n".to_owned(),
    };
    let (open, close) = (mark("<tool_call>"), mark("</tool_call>"));
    let text = format!(
        "{start}calls: call{more}\ncall: {open} \"\\n\" function \"</function>\\n\" {close}\n\
         function: {}\nTEXT: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/\n{COMMON_TERMINALS}{}",
        functions.join(" | "),
        rules.text
    );
    // Rules that nothing uses are refused, and text is used by one start alone.
    parts.rules = Some(text);
    parts.values = rules.values;
    Ok(())
}

struct Rules {
    text: String,
    values: Vec<GrammarWithLexer>,
    /// Names given out so far.
    names: usize,
}

impl Rules {
    fn name(&mut self, kind: &str) -> String {
        self.names += 1;
        format!("{kind}{}", self.names)
    }

    /// Any parameters with any values.
    fn free(&mut self) -> String {
        let name = self.name("ANY");
        self.text.push_str(&format!("{name}: /<parameter=[^\\n<>]+>\\n/ (FREE & ~TAGGED) {VALUE_CLOSE}\n"));
        format!("{name}*")
    }

    /// Parameters of a tool's schema, in its order.
    fn strict(&mut self, tool: &Tool) -> Result<String> {
        let root = &tool.parameters;
        schema::measure(root)?;
        let Value::Object(map) = root else {
            return Err(GrammarError::invalid("", "must be an object schema"));
        };
        const READ: [&str; 4] = ["properties", "required", "additionalProperties", "type"];
        // The whole is checked as any schema is; only its own properties can then be parameters.
        schema::enforced(root)?;
        let combined = ["allOf", "anyOf", "oneOf", "$ref", "const", "enum"];
        if let Some(key) = combined.iter().find(|key| map.contains_key(**key)) {
            let detail = format!("beside it, parameters can have {} only", READ.join(", "));
            return Err(GrammarError::unsupported(format!("/{key}"), detail));
        }
        if !Facts::new(root).types(root).has(Types::OBJECT) {
            return Err(GrammarError::unsupported("/type", "parameters are an object"));
        }
        let empty = Map::new();
        let properties = map.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required = map.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        if let Some(index) =
            required.iter().position(|name| !name.as_str().is_some_and(|name| properties.contains_key(name)))
        {
            let detail = "a required parameter must be among the properties";
            return Err(GrammarError::unsupported(format!("/required/{index}"), detail));
        }
        let mut body = Vec::new();
        for (key, property) in properties {
            let at = schema::step("/properties", key);
            let rule = self.parameter(root, key, property, &at);
            let is_required = required.iter().any(|name| name == key);
            match rule? {
                Some(rule) if is_required => body.push(rule),
                Some(rule) => body.push(format!("{rule}?")),
                None if is_required => {
                    return Err(GrammarError::unsupported(at, "no value can satisfy this parameter"));
                }
                None => {}
            }
        }
        Ok(body.join(" "))
    }

    /// The rule of one parameter; `None` if it can have no value.
    fn parameter(&mut self, root: &Value, key: &str, schema: &Value, at: &str) -> Result<Option<String>> {
        if key.is_empty() || key.contains(['\n', '\r', '<', '>']) {
            return Err(GrammarError::unsupported(at, "this name cannot be written in a call"));
        }
        let types = Facts::new(root).types(schema);
        let mut ways = Vec::new();
        if types.has(Types::STRING) {
            if let Some(text) = text(root, schema, types, at)? {
                let name = self.name("VALUE");
                self.text.push_str(&format!("{name}: (({text}) & ~TAGGED) {VALUE_CLOSE}\n"));
                ways.push(name);
            }
            // A type that is not said is any type to a schema, and text or JSON to the reader of a call.
            let containers = types.and(Types::ARRAY.or(Types::OBJECT));
            if containers != Types::NONE && types != Types::ALL {
                let names: Vec<&str> = [(Types::ARRAY, "array"), (Types::OBJECT, "object")]
                    .iter()
                    .filter(|(bit, _)| containers.has(*bit))
                    .map(|(_, name)| *name)
                    .collect();
                ways.push(
                    self.json(json!({"allOf": [schema::enforced_part(root, schema, at)?], "type": names})),
                );
            }
        } else if types != Types::NONE {
            ways.push(self.json(schema::enforced_part(root, schema, at)?));
        }
        if ways.is_empty() {
            return Ok(None);
        }
        let open = format!("<parameter={key}>\n");
        let name = self.name("parameter");
        self.text.push_str(&format!("{name}: {} ({})\n", Value::from(open), ways.join(" | ")));
        Ok(Some(name))
    }

    /// A JSON value and what ends it.
    fn json(&mut self, mut schema: Value) -> String {
        // Definitions are looked for at the root.
        let inner = schema.get_mut("allOf").and_then(|all| all.get_mut(0)).and_then(Value::as_object_mut);
        if let Some(definitions) = inner.and_then(|inner| inner.remove("$defs")) {
            schema["$defs"] = definitions;
        }
        let name = self.name("value");
        self.values.push(GrammarWithLexer { name: Some(name.clone()), ..json_grammar(schema) });
        format!("@{name} {VALUE_CLOSE}")
    }
}

/// A terminal for texts that the reader of the call makes a valid value of: strings, and where other types are
/// allowed as well, plain values of those.
fn text(root: &Value, schema: &Value, types: Types, at: &str) -> Result<Option<String>> {
    if types == Types::ALL {
        return match is_open(schema) {
            true => Ok(Some("FREE".to_owned())),
            false => Err(GrammarError::unsupported(at, "say the type of this parameter")),
        };
    }
    if let Some(values) = listed(schema) {
        let texts: Vec<String> = values.iter().filter_map(|value| written(value, types)).collect();
        return Ok((!texts.is_empty()).then(|| texts.join(" | ")));
    }
    let strings = strings(root, schema, at, 0)?;
    let others = types.without(Types::STRING).without(Types::ARRAY).without(Types::OBJECT);
    let is_nullable = schema.get("nullable") == Some(&Value::Bool(true));
    if types == Types::STRING && !is_nullable {
        return Ok(Some(strings));
    }
    let mut ways = vec![format!("(({strings}) & ~TYPED)")];
    if others.has(Types::NULL) {
        ways.push("\"null\"".to_owned());
    }
    if others.has(Types::BOOLEAN) {
        ways.push("/true|false/".to_owned());
    }
    if others.has(Types::NUMBER) {
        let Some(number) = plain_number(root, schema, 0) else {
            let detail = "numbers beside strings are supported without bounds only";
            return Err(GrammarError::unsupported(at, detail));
        };
        ways.push(number.to_owned());
    }
    Ok(Some(ways.join(" | ")))
}

/// Whether the schema says nothing about values.
fn is_open(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.keys().all(|key| {
            matches!(
                key.as_str(),
                "title" | "description" | "default" | "examples" | "$comment" | "deprecated"
            )
        }),
        schema => schema == true,
    }
}

fn listed(schema: &Value) -> Option<&[Value]> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(values),
        _ => None,
    }
}

/// A listed value as a terminal, if the reader of the call makes the same value of its text.
fn written(value: &Value, types: Types) -> Option<String> {
    match value {
        Value::String(text) => {
            let exact = |name: &str| text == name;
            let starts = text.trim_start().starts_with(['[', '{']);
            let is_typed = (types.has(Types::NULL) && exact("null"))
                || (types.has(Types::BOOLEAN) && (exact("true") || exact("false")))
                || (types.has(Types::NUMBER) && text.starts_with(|c: char| c == '-' || c.is_ascii_digit()))
                || (types.has(Types::ARRAY.or(Types::OBJECT)) && starts);
            (!is_typed && !text.ends_with('\r')).then(|| Value::from(text.as_str()).to_string())
        }
        value => Some(Value::from(value.to_string()).to_string()),
    }
}

/// The strings a schema allows, as a terminal.
fn strings(root: &Value, schema: &Value, at: &str, depth: usize) -> Result<String> {
    if depth == DEPTH_MAX {
        return Err(GrammarError::too_complex(at, "too many references and combinations for one string"));
    }
    let Value::Object(map) = schema else {
        return Ok(if schema == false { "~FREE".to_owned() } else { "FREE".to_owned() });
    };
    if map.get("type").is_some_and(|names| Types::read(names).is_ok_and(|types| !types.has(Types::STRING))) {
        return Ok("~FREE".to_owned());
    }
    let mut all = Vec::new();
    if let Some(values) = listed(schema) {
        let texts = values.iter().filter(|value| value.is_string());
        let texts: Vec<String> = texts.filter_map(|value| written(value, Types::STRING)).collect();
        all.push(if texts.is_empty() { "~FREE".to_owned() } else { texts.join(" | ") });
    }
    if let Some(text) = map.get("pattern").and_then(Value::as_str) {
        all.push(terminal(&pattern::whole(text, Dialect::Schema, at)?));
    }
    if let Some(expression) = map.get("format").and_then(Value::as_str).and_then(formats::expression) {
        all.push(terminal(&expression));
    }
    let length = |key: &str| map.get(key).and_then(Value::as_u64);
    if let (least, most @ Some(_)) | (least @ Some(_), most) = (length("minLength"), length("maxLength")) {
        let most = most.map_or(String::new(), |most| most.to_string());
        all.push(terminal(&format!("(?s:.{{{},{most}}})", least.unwrap_or(0))));
    }
    let mut inner = |schema: &Value| strings(root, schema, at, depth + 1);
    if let Some(Value::Array(parts)) = map.get("allOf") {
        for part in parts {
            all.push(inner(part)?);
        }
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(parts)) = map.get(key) {
            let parts: Vec<String> = parts.iter().map(&mut inner).collect::<Result<_>>()?;
            all.push(parts.iter().map(|part| format!("({part})")).collect::<Vec<_>>().join(" | "));
        }
    }
    if let Some(target) = Facts::new(root).target(map) {
        all.push(inner(target)?);
    }
    match all.len() {
        0 => Ok("FREE".to_owned()),
        _ => Ok(all.iter().map(|part| format!("({part})")).collect::<Vec<_>>().join(" & ")),
    }
}

fn terminal(expression: &str) -> String {
    format!("/{}/", llguidance::regex_to_lark(expression, ""))
}

/// The terminal of numbers without bounds; `None` if there are bounds or combinations that may have some.
fn plain_number(root: &Value, schema: &Value, depth: usize) -> Option<&'static str> {
    let map = schema.as_object().filter(|_| depth < DEPTH_MAX)?;
    const BOUNDS: [&str; 6] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "allOf", "$ref"];
    if BOUNDS.iter().any(|key| map.contains_key(*key)) || listed(schema).is_some() {
        return None;
    }
    let parts = ["anyOf", "oneOf"].iter().filter_map(|key| map.get(*key)?.as_array()).flatten();
    let mut kinds = parts
        .filter(|part| Facts::new(root).types(part).has(Types::NUMBER))
        .map(|part| plain_number(root, part, depth + 1));
    if let Some(first) = kinds.next() {
        return kinds.try_fold(first?, |all, kind| kind.filter(|kind| *kind == all));
    }
    let has = |name: &str| match map.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(names)) => names.iter().any(|one| one == name),
        _ => false,
    };
    match (has("number"), has("integer")) {
        (true, _) => Some(r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?/"),
        (false, true) => Some("/-?(?:0|[1-9][0-9]*)/"),
        _ => None,
    }
}
