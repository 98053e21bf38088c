//! Tool calls in the family's form, with arguments that follow their schema.
//!
//! `<tool_call>`, line break, `<function=NAME>`, for every parameter `<parameter=KEY>`, line break, value,
//! line break, `</parameter>`, then `</function>`, `</tool_call>`, a line break after each but the last.
//! Strings stand as they are, everything else as JSON, just as [`crate::ReplyParser`] reads them back.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

use super::error::{GrammarError, GrammarFault};
use super::matcher::Loosened;
use super::plain::Plain;
use super::schema::{self, Budget, Facts, Types, loosen};
use super::{Calls, json_grammar};
use crate::message::Tool;
use crate::tokenizer::Tokenizer;

type Result<T> = std::result::Result<T, GrammarError>;

/// Most schemas of one tool looked at for their types.
const LOOKS_MAX: u32 = 1 << 16;
/// Most obstacles taken out of the schemas of all tools, one at a time.
const REPAIRS_MAX: usize = 48;
/// Most conditions of one tool that are named as left out.
const NAMED_MAX: usize = 64;
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

/// Adds the calls, and says what is not enforced. `free` leaves all arguments of functions that are not
/// strict as they come.
pub(super) fn add(
    parts: &mut Parts,
    calls: &Calls,
    tokenizer: &Tokenizer,
    free: bool,
) -> Result<Vec<Loosened>> {
    let mark = |text: &str| match tokenizer.control_id(text) {
        Some(id) => format!("<[{id}]>"),
        None => format!("{text:?}"),
    };
    let mut rules = Rules::new();
    let (mut functions, mut loosened) = (Vec::new(), Vec::new());
    for (index, tool) in calls.tools.iter().enumerate() {
        let mut dropped = Vec::new();
        let body = match tool.strict {
            true => rules.strict(&tool.parameters),
            false if free => {
                dropped.push(String::new());
                Ok(rules.free())
            }
            false => rules.loose(tool, &mut dropped),
        };
        let body = body.map_err(|error| error.at_index(index))?;
        dropped.truncate(NAMED_MAX);
        loosened.extend(dropped.into_iter().map(|pointer| Loosened { tool: index, pointer }));
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
    parts.rules = Some(text);
    parts.values = rules.values;
    Ok(loosened)
}

struct Rules {
    text: String,
    values: Vec<GrammarWithLexer>,
    /// Names given out so far.
    names: usize,
    budget: Budget,
    plain: Plain,
    /// Obstacles that may still be taken away.
    repairs: usize,
}

impl Rules {
    fn new() -> Self {
        let (text, values) = (String::new(), Vec::new());
        let (budget, plain) = (Budget::new(), Plain::new());
        Self { text, values, names: 0, budget, plain, repairs: REPAIRS_MAX }
    }

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

    /// Parameters of a tool's schema as far as that can be enforced; pointers to the rest go to `dropped`.
    fn loose(&mut self, tool: &Tool, dropped: &mut Vec<String>) -> Result<String> {
        let is_open = tool.parameters.get("properties").is_none()
            && tool.parameters.get("additionalProperties") != Some(&Value::Bool(false));
        if schema::measure(&tool.parameters).is_err() {
            dropped.push(String::new());
            return Ok(self.free());
        }
        let mut schema = tool.parameters.clone();
        loosen::keywords(&mut schema, "", dropped);
        loosen::resolve(&mut schema);
        loosen::required(&mut schema, dropped);
        loop {
            let (text, values) = (self.text.len(), self.values.len());
            let (budget, plain) = (self.budget, self.plain);
            let error = match self.strict(&schema) {
                Ok(body) if body.is_empty() && is_open => return Ok(self.free()),
                Err(error) if error.fault != GrammarFault::Invalid => error,
                body => return body,
            };
            self.text.truncate(text);
            self.values.truncate(values);
            (self.budget, self.plain) = (budget, plain);
            if self.repairs == 0 || !loosen::repair(&mut schema, &error.pointer) {
                dropped.push(String::new());
                return Ok(self.free());
            }
            self.repairs -= 1;
            if dropped.last() != Some(&error.pointer) {
                dropped.push(error.pointer);
            }
        }
    }

    /// Parameters of a tool's schema, in its order.
    fn strict(&mut self, root: &Value) -> Result<String> {
        schema::measure(root)?;
        let Value::Object(map) = root else {
            return Err(GrammarError::invalid("", "must be an object schema"));
        };
        const READ: [&str; 4] = ["properties", "required", "additionalProperties", "type"];
        // The whole is checked as any schema is; only its own properties can then be parameters.
        schema::enforced_part(root, root, "", &mut self.budget)?;
        let combined = ["allOf", "anyOf", "oneOf", "$ref", "const", "enum"];
        if let Some(key) = combined.iter().find(|key| map.contains_key(**key)) {
            let detail = format!("beside it, parameters can have {} only", READ.join(", "));
            return Err(GrammarError::unsupported(format!("/{key}"), detail));
        }
        let mut facts = Facts::new(root, LOOKS_MAX);
        if !facts.types(root).has(Types::OBJECT) {
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
            let rule = self.parameter(&mut facts, root, key, property, &at);
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
    fn parameter<'s>(
        &mut self,
        facts: &mut Facts<'s>,
        root: &'s Value,
        key: &str,
        schema: &'s Value,
        at: &str,
    ) -> Result<Option<String>> {
        if key.is_empty() || key.contains(['\n', '\r', '<', '>']) {
            return Err(GrammarError::unsupported(at, "this name cannot be written in a call"));
        }
        let types = facts.types(schema);
        let mut ways = Vec::new();
        if types.has(Types::STRING) {
            if let Some(text) = self.plain.text(facts, schema, types, at)? {
                let name = self.name("VALUE");
                self.text.push_str(&format!("{name}: (({text}) & ~TAGGED) {VALUE_CLOSE}\n"));
                ways.push(name);
            }
            // A type that is not said is any type to a schema, and text or JSON to the reader of a call.
            let containers = types.and(Types::ARRAY.or(Types::OBJECT));
            if containers != Types::NONE && types != Types::ALL {
                let names = [(Types::ARRAY, "array"), (Types::OBJECT, "object")];
                let names = names.into_iter().filter(|(kind, _)| containers.has(*kind)).map(|(_, name)| name);
                let form = schema::enforced_part(root, schema, at, &mut self.budget)?;
                ways.push(self.json(json!({"allOf": [form], "type": names.collect::<Vec<_>>()})));
            }
        } else if types != Types::NONE {
            let form = schema::enforced_part(root, schema, at, &mut self.budget)?;
            ways.push(self.json(form));
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
