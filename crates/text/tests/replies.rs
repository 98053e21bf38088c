//! Replies as models write them, right and wrong.

// A failed `unwrap` fails the test, in helpers as well.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use serde_json::{Value, json};
use text::{End, Note, Piece, Reply, ReplyOptions, ReplyParser, Tool, call_id};

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "zip": {"type": "string"}, "days": {"type": "integer"},
        "exact": {"type": "number"},
        "flag": {"type": "boolean"}, "list": {"type": "array"}, "more": {"type": "object"}}});
    let tool = json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    Tool::parse_all(&tool).unwrap().into()
}

fn call(parameters: &[(&str, &str)]) -> String {
    let written: String =
        parameters.iter().map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n")).collect();
    format!("<tool_call>\n<function=weather>\n{written}</function>\n</tool_call>")
}

/// Reads the text at once and character by character; both must agree.
fn read(in_reasoning: bool, text: &str, end: End) -> Reply {
    let options = ReplyOptions { in_reasoning, raw_reasoning: false, tools: tools() };
    let whole = Reply::read(options.clone(), text, end);
    let mut parser = ReplyParser::new(options);
    let mut streamed = Reply::default();
    for c in text.chars() {
        parser.push(&c.to_string()).into_iter().for_each(|piece| streamed.absorb(piece));
    }
    parser.finish(end).into_iter().for_each(|piece| streamed.absorb(piece));
    assert_eq!(streamed, whole, "{text:?}");
    whole
}

fn check(in_reasoning: bool, text: &str, reasoning: &str, content: &str, arguments: &[&str]) {
    let reply = read(in_reasoning, text, End::Stop);
    let found: Vec<&str> = reply.calls.iter().map(|call| call.arguments.as_str()).collect();
    assert_eq!(
        (reply.reasoning.as_str(), reply.content.as_str(), &found[..]),
        (reasoning, content, arguments)
    );
    let indexes: Vec<usize> = reply.calls.iter().map(|call| call.index).collect();
    assert_eq!(indexes, (0..arguments.len()).collect::<Vec<_>>());
}

#[test]
fn reasoning_and_content() {
    check(true, "Hm.\nYes.\n</think>\n\nHello.\n", "Hm.\nYes.", "Hello.\n", &[]);
    check(true, "\n</think>\n\nHello", "", "Hello", &[]);
    check(true, "<think>\nHm.\n</think>\n\n  indented", "Hm.", "  indented", &[]);
    check(false, "<think>\nHm.\n</think>\n\nHello", "Hm.", "Hello", &[]);
    check(false, "\n\n</think>\n\nHello", "", "Hello", &[]);
    check(false, "Hello, a<b and <think> is a tag", "", "Hello, a<b and <think> is a tag", &[]);
    check(false, "", "", "", &[]);
    check(false, "\n", "", "\n", &[]);
}

#[test]
fn a_call_after_reasoning_leaves_no_content() {
    let text = format!("Look.\n</think>\n\n{}\n", call(&[("city", "Oslo")]));
    check(true, &text, "Look.", "", &[r#"{"city":"Oslo"}"#]);
}

#[test]
fn calls_in_a_row_keep_their_own_fields() {
    let two = format!("{}\n{}", call(&[("city", "Oslo"), ("days", "3")]), call(&[("city", "Rome")]));
    check(false, &two, "", "", &[r#"{"city":"Oslo","days":3}"#, r#"{"city":"Rome"}"#]);
    let text = format!("Both:\n\n{two}\n\nDone.");
    check(false, &text, "", "Both:\n\n\n\nDone.", &[r#"{"city":"Oslo","days":3}"#, r#"{"city":"Rome"}"#]);
    check(false, &call(&[]), "", "", &["{}"]);
    assert_ne!(call_id("r", 0), call_id("r", 1));
}

#[test]
fn calls_quoted_in_reasoning_are_none() {
    let quoted = format!("One writes {} here.", call(&[("city", "Oslo")]));
    check(true, &format!("{quoted}\n</think>\n\nNo."), &quoted, "No.", &[]);
    assert!(read(true, &format!("{quoted}\n</think>\n\nNo."), End::Stop).notes.is_empty());
}

#[test]
fn the_schema_types_the_arguments() {
    let text =
        call(&[("zip", "02134"), ("city", "true"), ("days", "5.0"), ("exact", "1e5"), ("flag", "True")]);
    check(false, &text, "", "", &[r#"{"zip":"02134","city":"true","days":5,"exact":1e5,"flag":true}"#]);
    let text = call(&[("zip", "1e5"), ("list", "[1, 2]"), ("more", "{\"b\": 1, \"a\": null}"), ("new", "7")]);
    check(false, &text, "", "", &[r#"{"zip":"1e5","list":[1,2],"more":{"b":1,"a":null},"new":"7"}"#]);
}

#[test]
fn a_value_of_the_wrong_type_stays_text_with_a_note() {
    let reply = read(false, &call(&[("days", "2026-01-15"), ("city", "Oslo")]), End::Stop);
    assert_eq!(reply.calls[0].arguments, r#"{"days":"2026-01-15","city":"Oslo"}"#);
    let path = "tool_calls[0].function.arguments.days".to_owned();
    assert_eq!(reply.notes, [Note { code: "argument_kept_as_text", path }]);
    let repeated = read(false, &call(&[("city", "a"), ("days", "1"), ("city", "b")]), End::Stop);
    assert_eq!(repeated.calls[0].arguments, r#"{"city":"a","days":1}"#, "what was given out stands");
    assert_eq!(repeated.notes[0].code, "argument_repeated");
}

/// What goes wrong in practice: every one stays content to the letter and is noted.
const MALFORMED: [&str; 33] = [
    "<tool_call>",
    "<tool_call>\n",
    "<tool_call></tool_call>",
    "<tool_call>\n\n</tool_call>",
    "<tool_call>\ntext\n</tool_call>",
    "<tool_call>\n<function=weather>\n</tool_call>",
    "<tool_call>\n<function=weather>\n</function>",
    "<tool_call>\n<function=weather\n</function>\n</tool_call>",
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
    "<tool_call>\n<function>weather</function>\n</tool_call>",
    "<tool_call>\n<function name=\"weather\">\n</function>\n</tool_call>",
    "<tool_call>\n<weather>\n</weather>\n</tool_call>",
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Os",
    "<tool_call>\nweather(city=\"Oslo\")\n</tool_call>",
    "<tool_call>\nstray\n<function=weather>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\nstray\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n</function>\nstray\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n\
     </function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city\nOslo\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<city>Oslo</city>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\nand\n</function>\n</tool_call>",
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
    "<tool_calls>\n<function=weather>\n</function>\n</tool_calls>",
    "</tool_call>",
    "<tool_call\n<function=weather>\n</function>\n</tool_call>",
];

#[test]
fn malformed_calls_stay_content_to_the_letter() {
    for text in MALFORMED {
        for (before, after) in [("", ""), ("Let me see.\n\n", ""), ("a ", " b")] {
            let text = format!("{before}{text}{after}");
            let reply = read(false, &text, End::Stop);
            assert_eq!((reply.content.as_str(), reply.calls.len()), (text.as_str(), 0));
            assert_eq!(reply.notes, [Note { code: "tool_call_unparsed", path: String::new() }], "{text}");
        }
        let reasoned = read(true, &format!("Hm.\n</think>\n\n{text}"), End::Stop);
        assert_eq!((reasoned.reasoning.as_str(), reasoned.content.as_str()), ("Hm.", text));
    }
}

#[test]
fn a_good_call_behind_a_broken_one_is_read() {
    let good = call(&[("city", "Oslo")]);
    for broken in
        ["<tool_call>\n<function=weather>\n</function>\n", "<tool_call>\n</tool_call>", "<tool_call>"]
    {
        check(false, &format!("{broken}{good}"), "", broken, &[r#"{"city":"Oslo"}"#]);
    }
}

#[test]
fn a_call_cut_by_length_is_told_apart() {
    let reply = read(false, "ok <tool_call>\n<function=weather>\n<para", End::Length);
    assert_eq!(reply.content, "ok ");
    assert_eq!(reply.incomplete_call.as_deref(), Some("<tool_call>\n<function=weather>\n<para"));
    assert!(reply.notes.is_empty());
    assert_eq!(read(false, "ok <tool_", End::Length).content, "ok <tool_");
}

#[test]
fn an_end_inside_reasoning_is_noted() {
    let reply = read(true, "Hm. <", End::Stop);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("Hm. <", ""));
    assert_eq!(reply.notes[0].code, "ended_in_reasoning");
    assert!(read(true, "Hm.", End::Length).notes.is_empty());
}

#[test]
fn functions_that_were_not_offered_are_not_called() {
    let other = "<tool_call>\n<function=other>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>";
    let reply = read(false, other, End::Stop);
    assert_eq!((reply.content.as_str(), reply.calls.len()), (other, 0));
    let codes: Vec<&str> = reply.notes.iter().map(|note| note.code).collect();
    assert!(codes.contains(&"tool_unknown") && codes.contains(&"tool_call_unparsed"), "{codes:?}");
    let good = call(&[("city", "Oslo")]);
    check(false, &format!("{other}\n{good}"), "", &format!("{other}\n"), &[r#"{"city":"Oslo"}"#]);
}

/// The pieces of a reply read character by character.
fn pieces(text: &str, end: End) -> Vec<Piece> {
    let mut parser = ReplyParser::new(ReplyOptions { tools: tools(), ..ReplyOptions::default() });
    let mut pieces: Vec<Piece> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
    pieces.extend(parser.finish(end));
    pieces
}

#[test]
fn arguments_come_as_they_are_written() {
    let city = "Oslo \"north\"\n\n\u{1f600} <p></parameter></p>\n";
    let text = call(&[("city", city), ("days", "5.0"), ("list", "[1, 2]")]);
    let pieces = pieces(&format!("{text}\n{}", call(&[])), End::Stop);
    let mut joined = vec![String::new(); 2];
    let mut whole = Vec::new();
    let mut begun = Vec::new();
    for piece in pieces {
        match piece {
            Piece::CallBegin { index, name } => begun.push((index, name)),
            Piece::CallArguments { index, json } => {
                assert_eq!((begun.len(), whole.len()), (index + 1, index), "one after the other");
                // No escape is cut: what ends in a backslash ends in an escaped one.
                let slashes = json.bytes().rev().take_while(|byte| *byte == b'\\').count();
                assert_eq!(slashes % 2, 0, "{json}");
                joined[index].push_str(&json);
            }
            Piece::ToolCall(call) => whole.push(call),
            other => panic!("{other:?}"),
        }
    }
    let wanted = json!({"city": city, "days": 5, "list": [1, 2]}).to_string();
    assert_eq!(joined, [wanted, "{}".to_owned()]);
    assert_eq!(
        whole.iter().map(|call| &call.arguments).collect::<Vec<_>>(),
        joined.iter().collect::<Vec<_>>()
    );
    assert_eq!(begun, [(0, "weather".to_owned()), (1, "weather".to_owned())]);
}

#[test]
fn a_call_that_began_and_is_none_is_dropped() {
    let broken = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\nand";
    for (text, end) in [(format!("{broken} more"), End::Stop), (broken.to_owned(), End::Stop)] {
        let pieces = pieces(&text, end);
        let dropped = pieces.iter().filter(|piece| matches!(piece, Piece::CallDropped { index: 0 })).count();
        assert_eq!(dropped, 1);
        assert_eq!(read(false, &text, end).content, text);
    }
    // What follows is read again, and counts on.
    let reply = read(false, &format!("{broken}\n{}", call(&[("city", "Rome")])), End::Stop);
    assert_eq!((reply.content, reply.calls[0].index), (format!("{broken}\n"), 1));
    let cut = pieces("<tool_call>\n<function=weather>\n<parameter=city>\nOs", End::Length);
    assert!(matches!(cut.first(), Some(Piece::CallBegin { index: 0, .. })));
    assert!(matches!(cut.last(), Some(Piece::IncompleteCall(_))));
}

#[test]
fn without_tools_nothing_is_a_call() {
    let text = call(&[("city", "Oslo")]);
    let reply = Reply::read(ReplyOptions::default(), &text, End::Stop);
    assert_eq!((reply.content, reply.calls.len(), reply.notes.len()), (text, 0, 0));
}

#[test]
fn raw_reasoning_stays_in_the_content() {
    let options = |in_reasoning| ReplyOptions { in_reasoning, raw_reasoning: true, tools: tools() };
    let call = call(&[("city", "Oslo")]);
    for (in_reasoning, thought) in [(true, "Hm.\n</think>"), (false, "<think>\nHm. <tool_call>\n</think>")] {
        let answer = Reply::read(options(in_reasoning), &format!("{thought}\n\nYes."), End::Stop);
        assert_eq!((answer.content, answer.reasoning), (format!("{thought}\n\nYes."), String::new()));
        let called = Reply::read(options(in_reasoning), &format!("{thought}\n\n{call}"), End::Stop);
        assert_eq!((called.content.as_str(), called.calls.len()), (thought, 1));
    }
}

#[test]
fn control_tokens_of_reasoning_are_obeyed_anywhere() {
    let options = ReplyOptions { in_reasoning: false, raw_reasoning: false, tools: tools() };
    let mut parser = ReplyParser::new(options);
    let mut reply = Reply::default();
    for (control, text) in [
        (false, "One"),
        (true, "</think>"),
        (false, "\ntwo "),
        (true, "<think>"),
        (false, "\nHm. <think> is a word.\n"),
        (true, "<think>"),
        (true, "</think>"),
        (false, "\n\nthree <think>"),
    ] {
        let pieces = if control { parser.push_control(text) } else { parser.push(text) };
        pieces.into_iter().for_each(|piece| reply.absorb(piece));
    }
    parser.finish(End::Stop).into_iter().for_each(|piece| reply.absorb(piece));
    assert_eq!(reply.content, "Onetwo three <think>");
    assert_eq!(reply.reasoning, "Hm. <think> is a word.");
}

#[test]
fn arguments_are_valid_json_of_the_written_keys() {
    let text = call(&[("a\"b", "x\n\"y\""), ("days", "3")]);
    let reply = read(false, &text, End::Stop);
    let arguments: Value = serde_json::from_str(&reply.calls[0].arguments).unwrap();
    assert_eq!(arguments, json!({"a\"b": "x\n\"y\"", "days": 3}));
}
