//! Tool calls drawn at random are whole calls with valid arguments.

use std::sync::Arc;

use serde_json::{Value, json};
use text::{Answer, Calls, End, Grammar, GrammarFault, Reply, ReplyOptions, Tool};

use crate::support::{demo, draw};
use crate::validity;

fn tools(strict: bool) -> Vec<Tool> {
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "detail": {"type": ["string", "null", "integer"]},
        "where": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
        "box": {"type": "object", "properties": {"w": {"$ref": "#/$defs/size"}}, "required": ["w"],
            "additionalProperties": false},
        "code": {"anyOf": [{"$ref": "#/$defs/code"}, {"enum": [7, "8", null]}, {"type": "boolean"}]},
        "any": {}},
        "required": ["city", "days", "box"], "additionalProperties": false,
        "$defs": {"size": {"type": "number", "minimum": 0, "maximum": 9},
            "code": {"type": "string", "pattern": "^[A-Z]+$", "maxLength": 3}}});
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "strict": strict, "parameters": weather}},
        {"type": "function", "function": {"name": "now", "strict": strict}},
    ]);
    Tool::parse_all(&tools).unwrap()
}

fn compile(answer: Option<&Answer>, tools: &[Tool], required: bool, parallel: bool) -> Grammar {
    demo().1.compile(answer, Some(&Calls { tools, required, parallel })).unwrap()
}

fn read(tools: &[Tool], text: &str) -> Reply {
    let options = ReplyOptions { in_reasoning: false, raw_reasoning: false, tools: Arc::from(tools) };
    Reply::read(options, text, End::Stop)
}

fn check(tools: &[Tool], reply: &Reply, text: &str) {
    for call in &reply.calls {
        let tool = tools.iter().find(|tool| tool.name == call.name).unwrap();
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        assert_eq!(
            validity::fault(&tool.parameters, &tool.parameters, &arguments),
            None,
            "{text}\n{arguments}"
        );
    }
    assert!(reply.notes.is_empty() && reply.incomplete_call.is_none(), "{text}: {:?}", reply.notes);
}

#[test]
fn required_calls_are_all_there_is() {
    let tools = tools(true);
    for parallel in [false, true] {
        let grammar = compile(None, &tools, true, parallel);
        let mut most = 0;
        for seed in 1..40 {
            let Some(text) = draw(&grammar, seed, 70) else { continue };
            let reply = read(&tools, &text);
            check(&tools, &reply, &text);
            assert!(!reply.calls.is_empty() && reply.content.is_empty(), "{text}");
            assert!(parallel || reply.calls.len() == 1);
            most = most.max(reply.calls.len());
        }
        assert!(most > usize::from(parallel), "{most}");
    }
}

#[test]
fn a_named_function_is_the_one_that_is_called() {
    let tools = tools(true);
    let grammar = compile(None, &tools[1..], true, false);
    assert_eq!(draw(&grammar, 1, 30).unwrap(), "<tool_call>\n<function=now>\n</function>\n</tool_call>");
}

#[test]
fn an_answer_or_calls() {
    let tools = tools(true);
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": false});
    let grammar = compile(Some(&Answer::Schema(schema.clone())), &tools, false, true);
    let (mut answers, mut calls) = (0, 0);
    for seed in 1..60 {
        let Some(text) = draw(&grammar, seed, 60) else { continue };
        let reply = read(&tools, &text);
        check(&tools, &reply, &text);
        if reply.calls.is_empty() {
            let value = serde_json::from_str(&reply.content).unwrap();
            assert_eq!(validity::fault(&schema, &schema, &value), None);
            answers += 1;
        } else {
            assert_eq!(reply.content, "");
            calls += 1;
        }
    }
    assert!(answers > 5 && calls > 2, "{answers} {calls}");
}

#[test]
fn text_with_calls() {
    let tools = tools(true);
    let (tokenizer, _, _) = demo();
    let grammar = compile(None, &tools, false, true);
    let call = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
    let accepts = |text: &str| {
        let mut matcher = grammar.matcher();
        tokenizer.encode_raw(text).unwrap().into_iter().all(|id| matcher.advance(id).is_ok())
            && matcher.can_end()
    };
    assert!(accepts("Let me look.\n\n"));
    assert!(accepts(&format!("Let me look.\n\n{call}\n{call}")));
    assert!(accepts(&format!("{call} Done.")));
    assert!(!accepts("<tool_call>\n<function=other>\n</function>\n</tool_call>"));
    assert!(!accepts("<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"));
    // Spelled by letters, the marker opens a call to the reader all the same.
    let mut matcher = grammar.matcher();
    let letters = tokenizer.encode_text("see <tool_call>").unwrap();
    assert!(!letters.into_iter().all(|id| matcher.advance(id).is_ok()));
    for seed in 1..20 {
        let Some(text) = draw(&grammar, seed, 25) else { continue };
        check(&tools, &read(&tools, &text), &text);
    }
}

/// One keyword that cannot be enforced costs itself and nothing else.
#[test]
fn loose_tools_are_enforced_as_far_as_that_goes() {
    let parameters = json!({"type": "object", "properties": {
        "link": {"type": "string", "format": "uri", "maxLength": 9},
        "kind": {"oneOf": [{"enum": ["a", "b"]}, {"const": "b"}]},
        "count": {"type": "integer", "minimum": 1, "maximum": 3, "multipleOf": 1},
        "more": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
            "patternProperties": {"^x": {}}, "additionalProperties": false}},
        "required": ["link", "kind", "count", "more", "elsewhere"], "additionalProperties": false});
    let tools = |strict: bool| {
        Tool::parse_all(&json!([{"type": "function", "function": {"name": "now"}}, {"type": "function",
            "function": {"name": "f", "strict": strict, "parameters": parameters}}]))
        .unwrap()
    };
    let tools_now = tools(true);
    let strict = Calls { tools: &tools_now, required: true, parallel: false };
    let error = demo().1.compile(None, Some(&strict)).unwrap_err();
    assert_eq!((error.index, error.fault), (Some(1), GrammarFault::Unsupported));
    let tools = tools(false);
    let grammar = compile(None, &tools[1..], true, false);
    let dropped: Vec<&str> = grammar.loosened().iter().map(|loosened| loosened.pointer.as_str()).collect();
    let wanted = [
        "/properties/link/format",
        "/properties/count/multipleOf",
        "/properties/more/patternProperties",
        "/required/4",
        "/properties/kind/oneOf/1",
    ];
    assert_eq!(dropped, wanted);
    let mut read_all = 0;
    for seed in 1..30 {
        let Some(text) = draw(&grammar, seed, 60) else { continue };
        let reply = read(&tools, &text);
        let arguments: Value = serde_json::from_str(&reply.calls[0].arguments).unwrap();
        assert!(arguments["link"].as_str().unwrap().chars().count() <= 9, "{text}");
        assert!(["a", "b"].contains(&arguments["kind"].as_str().unwrap()), "{text}");
        assert!((1..=3).contains(&arguments["count"].as_i64().unwrap()), "{text}");
        assert!(arguments["more"]["ok"].is_boolean(), "{text}");
        read_all += 1;
    }
    assert!(read_all > 5, "{read_all}");
    let open = Tool::parse_all(&json!([{"type": "function", "function": {"name": "f", "parameters":
        {"type": "object"}}}]))
    .unwrap();
    let grammar = compile(None, &open, true, false);
    let text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";
    let mut matcher = grammar.matcher();
    let ids = demo().0.encode_raw(text).unwrap();
    assert!(ids.into_iter().all(|id| matcher.advance(id).is_ok()), "parameters nobody declared may come");
    assert!(matcher.can_end());
}

#[test]
fn loose_tools_and_refusals() {
    let parse = |parameters: Value, strict: bool| {
        Tool::parse_all(&json!([{"type": "function", "function": {"name": "f", "strict": strict,
            "parameters": parameters}}]))
        .unwrap()
    };
    let compile =
        |tools: &[Tool]| demo().1.compile(None, Some(&Calls { tools, required: true, parallel: false }));
    for (parameters, pointer) in [
        (json!({"type": "object", "properties": {"a": {"not": {}}}}), "/properties/a/not"),
        (json!({"type": "object", "properties": {"a<b": {}}}), "/properties/a<b"),
        (json!({"type": "object", "required": ["z"]}), "/required/0"),
        (json!({"type": "object", "properties": {"a": {"minimum": 1}}}), "/properties/a"),
        (json!({"properties": {"a": {"type": ["string", "integer"], "minimum": 1}}}), "/properties/a"),
        (
            json!({"properties": {"a": {"type": ["string", "null"],
                "anyOf": [{"const": null}, {"minLength": 2}]}}}),
            "/properties/a",
        ),
        (json!({"anyOf": [{"type": "object"}]}), "/anyOf"),
        (json!({"type": "array"}), "/type"),
    ] {
        let error = compile(&parse(parameters.clone(), true)).unwrap_err();
        assert_eq!(
            (error.pointer.as_str(), error.index, error.fault),
            (pointer, Some(0), GrammarFault::Unsupported)
        );
        let tools = parse(parameters, false);
        let grammar = compile(&tools).unwrap();
        let text = (1..30).find_map(|seed| draw(&grammar, seed, 20)).unwrap();
        assert_eq!(read(&tools, &text).calls.len(), 1, "{text}");
    }
}

/// What multiplies is refused before it does.
#[test]
fn many_tools_stay_within_the_limits() {
    let big: serde_json::Map<String, Value> = (0..900)
        .map(|index| (format!("p{index}"), json!({"type": "array", "items": {"type": "integer"}})))
        .collect();
    let all: serde_json::Map<String, Value> =
        (0..900).map(|index| (format!("q{index}"), json!({"$ref": "#/$defs/big"}))).collect();
    let big =
        json!({"type": "object", "properties": all, "$defs": {"big": {"type": "object", "properties": big}}});
    let doubling: serde_json::Map<String, Value> = (0..15)
        .map(|index| {
            let next = json!({"$ref": format!("#/$defs/d{}", index + 1)});
            (format!("d{index}"), json!({"anyOf": [next, next, next, next]}))
        })
        .chain([("d15".to_owned(), json!({"type": "string"}))])
        .collect();
    let doubling = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": doubling});
    for (parameters, fault) in [(big, GrammarFault::TooComplex), (doubling, GrammarFault::Unsupported)] {
        let tools = Tool::parse_all(&json!([{"type": "function", "function": {"name": "f", "strict": true,
            "parameters": parameters}}]))
        .unwrap();
        let begin = std::time::Instant::now();
        let result = demo().1.compile(None, Some(&Calls { tools: &tools, required: true, parallel: false }));
        assert_eq!(result.unwrap_err().fault, fault);
        assert!(begin.elapsed() < std::time::Duration::from_secs(2), "{:?}", begin.elapsed());
        // A function that is not strict is not refused for it, and what is free is said.
        let tools: Vec<Tool> = tools.into_iter().map(|tool| Tool { strict: false, ..tool }).collect();
        let grammar = compile(None, &tools, true, false);
        assert!(!grammar.loosened().is_empty());
    }
    let many: Vec<Value> = (0..200)
        .map(|index| {
            json!({"type": "function", "function": {"name": format!("f{index}"), "strict": true,
            "parameters": tools(true)[0].parameters}})
        })
        .collect();
    let many = Tool::parse_all(&Value::Array(many)).unwrap();
    demo().1.compile(None, Some(&Calls { tools: &many, required: false, parallel: true })).unwrap();
}
