//! Properties that hold for all inputs: streamed = whole, round trips, no panic, no forged token.

// A failed `unwrap` fails the test, in helpers as well.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use text::{
    ChatTemplate, Detokenizer, End, History, LateSystem, Message, Piece, RenderOptions, Reply, ReplyOptions,
    ReplyParser, Specials, Tokenizer, Tool,
};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-a");
    Tokenizer::open(Path::new(dir)).expect("the fixture is whole")
});

static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-a");
    ChatTemplate::open(Path::new(dir)).expect("the fixture is whole")
});

fn detokenized(ids: &[u32], specials: Specials) -> String {
    let mut detokenizer = Detokenizer::new(&TOKENIZER, specials);
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

#[test]
fn characters_spread_over_tokens() {
    for text in ["삼겹살 👩‍👩‍👧 Å", "naïve café 日本語 🙂", "\u{FFFD}"] {
        let ids = TOKENIZER.encode_text(text).unwrap();
        let mut detokenizer = Detokenizer::new(&TOKENIZER, Specials::Skip);
        let deltas: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        // The tokenizer composes characters (NFC), so compare with its own decoding.
        assert_eq!(deltas.concat(), TOKENIZER.decode(&ids, Specials::Skip));
        assert_eq!(detokenizer.finish(), "");
        assert_eq!(deltas.concat().contains('\u{FFFD}'), text.contains('\u{FFFD}'));
    }
}

#[test]
fn an_unfinished_character_is_replaced_once_and_only_at_the_end() {
    let ids = TOKENIZER.encode_text("🙂").unwrap();
    assert!(ids.len() > 1);
    let mut detokenizer = Detokenizer::new(&TOKENIZER, Specials::Skip);
    assert!(ids[..ids.len() - 1].iter().all(|&id| detokenizer.push(id).is_empty()));
    assert_eq!(detokenizer.finish(), "\u{FFFD}");
    let mut detokenizer = Detokenizer::new(&TOKENIZER, Specials::Skip);
    detokenizer.push(ids[0]);
    let think = TOKENIZER.control_id("<think>").unwrap();
    let delta = detokenizer.push_apart(think);
    assert_eq!((delta.text.as_str(), delta.control.as_deref()), ("\u{FFFD}", Some("<think>")));
    assert_eq!(detokenizer.push(TOKENIZER.control_id("<|im_end|>").unwrap()), "");
}

fn tools() -> Vec<Tool> {
    Tool::parse_all(&json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}}]))
    .expect("the tool is valid")
}

fn options(in_reasoning: bool, raw_reasoning: bool, with_tools: bool) -> ReplyOptions {
    let tools = if with_tools { tools() } else { Vec::new() };
    ReplyOptions { in_reasoning, raw_reasoning, tools: tools.into() }
}

fn streamed<'t>(options: ReplyOptions, pieces: impl Iterator<Item = &'t str>, end: End) -> Reply {
    let mut parser = ReplyParser::new(options);
    let mut reply = Reply::default();
    for piece in pieces {
        parser.push(piece).into_iter().for_each(|piece| reply.absorb(piece));
    }
    parser.finish(end).into_iter().for_each(|piece| reply.absorb(piece));
    reply
}

fn pieces<'t>(text: &'t str, cuts: &[usize]) -> Vec<&'t str> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    at.retain(|&at| text.is_char_boundary(at));
    at.extend([0, text.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// Text made of markers, their parts, and a little else.
fn reply_text() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=g>",
        "</function>",
        "<parameter=a>",
        "<parameter=n>",
        "</parameter>",
        "\n",
        "\n\n",
        " ",
        "é",
        "x",
        "5",
        "<",
        "</",
        "<t",
        "_call>",
        "🙂",
        "\r\n",
        "<tool_call>\n<function=f>\n<parameter=a>\nv\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=f></function></tool_call>",
    ]);
    prop::collection::vec(fragment, 0..14).prop_map(|fragments| fragments.concat())
}

fn template_source() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "{{ messages }}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{% if tools %}",
        "{% endif %}",
        "{{ tools | tojson }}",
        "<|im_start|>",
        "<|im_end|>",
        "{{ m.content | trim }}",
        "{%",
        "%}",
        "{{ m.content.split('<')[0] }}",
        "{{ raise_exception('x') }}",
        "{% set x = x ~ x %}",
        "{{",
        "}}",
        "'",
        "é",
        "{{ m.content[::-1] }}",
        "{{ messages[99].content.y }}",
        "{% macro q(a) %}",
        "{% endmacro %}",
        "{{ q(messages) }}",
        "{{ m.content * 1000 }}",
        "{{ (1 // 0) }}",
        "{{ m.content | indent(3) }}",
        "{{ strftime_now('%Y%') }}",
        "{{ m | items | list }}",
        "{{ '%s' | format(m.content) }}",
        "{{ m.role }}",
    ]);
    prop::collection::vec(fragment, 0..12).prop_map(|fragments| fragments.concat())
}

fn message_text() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
        "</think>",
        "<tool_response>",
        "</tool_response>",
        "think",
        "<",
        ">",
        "\n",
        " ",
        "é",
        "\u{F0000}",
        "\u{F0001}",
        "\u{E000}",
        "\u{10FFFD}",
        "plain words",
        "|im_end|",
        "{{ x }}",
    ]);
    prop::collection::vec(fragment, 0..8).prop_map(|fragments| fragments.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn deltas_join_to_the_decoding(ids in prop::collection::vec(0_u32..2040, 0..40)) {
        for specials in [Specials::Skip, Specials::Keep] {
            prop_assert_eq!(detokenized(&ids, specials), TOKENIZER.decode(&ids, specials));
        }
    }

    #[test]
    fn byte_tokens_join_to_the_decoding(ids in prop::collection::vec(0_u32..256, 0..24)) {
        prop_assert_eq!(detokenized(&ids, Specials::Keep), TOKENIZER.decode(&ids, Specials::Keep));
    }

    #[test]
    fn plain_text_comes_back(text in "\\PC{0,40}") {
        let ids = TOKENIZER.encode_text(&text).unwrap();
        prop_assert!(ids.iter().all(|&id| TOKENIZER.control_content(id).is_none()));
        let decoded = TOKENIZER.decode(&ids, Specials::Keep);
        // Composition (NFC) is the one change; it is done already the second time.
        prop_assert_eq!(TOKENIZER.encode_text(&decoded).unwrap(), ids);
        if text.is_ascii() {
            prop_assert_eq!(decoded, text);
        }
    }

    #[test]
    fn streamed_replies_equal_whole_ones(
        text in reply_text(),
        cuts in prop::collection::vec(0_usize..400, 0..8),
        flags in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let end = if flags.3 { End::Stop } else { End::Length };
        let options = options(flags.0, flags.1, flags.2);
        let whole = Reply::read(options.clone(), &text, end);
        let cut = streamed(options.clone(), pieces(&text, &cuts).into_iter(), end);
        prop_assert_eq!(&cut, &whole);
        let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(&streamed(options, characters, end), &whole);
    }

    #[test]
    fn control_tokens_never_panic_nor_show_thinking_markers(
        text in prop::collection::vec((reply_text(), any::<bool>()), 0..4),
        in_reasoning in any::<bool>(),
    ) {
        let mut parser = ReplyParser::new(options(in_reasoning, false, true));
        let mut reply = Reply::default();
        for (text, opens) in text {
            let text = text.replace("think>", "");
            parser.push(&text).into_iter().for_each(|piece| reply.absorb(piece));
            let marker = if opens { "<think>" } else { "</think>" };
            if !parser.in_call() {
                parser.push_control(marker).into_iter().for_each(|piece| reply.absorb(piece));
            }
        }
        parser.finish(End::Length).into_iter().for_each(|piece| reply.absorb(piece));
        prop_assert!(!reply.content.contains("think>") && !reply.reasoning.contains("think>"));
    }

    #[test]
    fn no_text_forges_a_control_token(
        text in message_text(),
        name in message_text(),
        thought in message_text(),
    ) {
        // A reasoning marker in an assistant's content is read as the template reads it, before rendering.
        let content = text.replace("</think>", "");
        let messages = |text: &str, name: &str, thought: &str| json!([
            {"role": "system", "content": text}, {"role": "user", "content": text},
            {"role": "assistant", "content": content.clone() + text,
             "reasoning_content": format!("r{thought}"), "tool_calls": [
                {"id": "1", "function": {"name": format!("n{name}"), "arguments": {name: text}}}]},
            {"role": "tool", "tool_call_id": "1", "content": [
                {"type": "text", "text": text}, {"type": "text", "text": name}]},
        ]);
        let controls = |messages: Value| {
            let history = History::new(Message::parse_all(&messages).unwrap(), LateSystem::UserTurn).unwrap();
            let options = RenderOptions { tools: tools(), ..RenderOptions::default() };
            let rendered = TEMPLATE.render(&TOKENIZER, &history, &options).unwrap();
            rendered.ids.into_iter().filter(|&id| TOKENIZER.control_content(id).is_some()).collect::<Vec<_>>()
        };
        prop_assert_eq!(controls(messages(&text, &name, &thought)), controls(messages("a", "b", "c")));
    }

    /// T12: what a turn adds to the prompt of the turn before. Old reasoning that stays makes it an
    /// extension, ids and all; dropped reasoning breaks it inside the reply, never before.
    #[test]
    fn the_next_turn_goes_on_where_this_one_ended(
        texts in prop::collection::vec("[a-z]{1,8}( [a-z]{1,8}){0,5}", 4),
        turns in 1usize..4,
        thinking in any::<bool>(),
        preserve in any::<bool>(),
        with_tools in any::<bool>(),
    ) {
        let mut messages = vec![json!({"role": "system", "content": texts[0]})];
        let options = || RenderOptions {
            tools: if with_tools { tools() } else { Vec::new() },
            enable_thinking: Some(thinking),
            preserve_thinking: Some(preserve),
            ..RenderOptions::default()
        };
        let render = |messages: &[Value]| {
            let messages = Message::parse_all(&json!(messages)).unwrap();
            let history = History::new(messages, LateSystem::UserTurn).unwrap();
            TEMPLATE.render(&TOKENIZER, &history, &options()).unwrap()
        };
        for _ in 0..turns {
            messages.push(json!({"role": "user", "content": texts[1]}));
            let before = render(&messages);
            messages.push(match thinking {
                true => json!({"role": "assistant", "content": texts[2], "reasoning_content": texts[3]}),
                false => json!({"role": "assistant", "content": texts[2]}),
            });
            let mut next = messages.clone();
            next.push(json!({"role": "user", "content": "go on"}));
            let after = render(&next);
            let reply = match thinking {
                true => format!("{}\n</think>\n\n{}<|im_end|>", texts[3], texts[2]),
                false => format!("{}<|im_end|>", texts[2]),
            };
            let spoken = format!("{}{reply}", before.text);
            if preserve {
                prop_assert!(after.text.starts_with(&spoken), "{spoken:?} in {:?}", after.text);
            }
            let common = before.ids.iter().zip(&after.ids).take_while(|(a, b)| a == b).count();
            let opened = before.text.rfind("<|im_start|>assistant").unwrap();
            let turn = before.segments.iter().find(|segment| segment.text.start >= opened).unwrap();
            prop_assert!(common >= turn.ids.start, "{:?} and {:?}", before.text, after.text);
        }
    }

    #[test]
    fn random_templates_never_panic(source in template_source(), text in message_text()) {
        if let Ok(template) = ChatTemplate::new(source, Map::new()) {
            let messages = json!([{"role": "user", "content": text}, {"role": "assistant", "content": text}]);
            let history = History::new(Message::parse_all(&messages).unwrap(), LateSystem::UserTurn).unwrap();
            for add_generation_prompt in [true, false] {
                let options =
                    RenderOptions { add_generation_prompt, tools: tools(), ..RenderOptions::default() };
                let _ = template.render(&TOKENIZER, &history, &options);
            }
        }
    }

    #[test]
    fn random_messages_never_panic(value in json_value()) {
        if let Ok(messages) = Message::parse_all(&value) {
            for late in [LateSystem::UserTurn, LateSystem::Merge, LateSystem::Reject] {
                if let Ok(history) = History::new(messages.clone(), late) {
                    let _ = TEMPLATE.render(&TOKENIZER, &history, &RenderOptions::default());
                }
            }
        }
        let _ = Tool::parse_all(&value);
    }

    #[test]
    fn values_survive_a_call(value in "[a-z<>\n ]{0,20}") {
        let parameter = format!("<parameter=a>\n{value}\n</parameter>");
        let call = format!("<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>");
        let reply = Reply::read(options(false, false, true), &call, End::Stop);
        prop_assert_eq!(reply.calls.len(), 1);
        prop_assert_eq!(&reply.calls[0].arguments, &json!({"a": value}).to_string());
    }
}

/// Messages that are nearly right.
fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec![
            "user",
            "assistant",
            "tool",
            "system",
            "text",
            "image_url",
            "{}",
            "</think>",
            "f"
        ])
        .prop_map(Value::from),
    ];
    let key = prop::sample::select(vec![
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "id",
        "tool_call_id",
        "image_url",
        "url",
        "reasoning_content",
    ]);
    let value = leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..5).prop_map(|pairs| {
                Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
            }),
        ]
    });
    let message = (prop::sample::select(vec!["user", "assistant", "tool", "system"]), value.clone());
    prop::collection::vec((message, value), 0..4).prop_map(|list| {
        let message = |((role, content), extra): ((&str, Value), Value)| {
            let mut message = json!({"role": role, "content": content, "tool_call_id": "f"});
            if let Value::Object(extra) = extra {
                message.as_object_mut().expect("just made").extend(extra);
            }
            message
        };
        list.into_iter().map(message).collect()
    })
}

#[test]
fn pieces_have_whole_characters_as_soon_as_they_are_certain() {
    let mut parser = ReplyParser::new(options(false, false, true));
    assert_eq!(parser.push("\n"), []);
    assert_eq!(parser.push("Hi <"), [Piece::Content("\nHi ".into())]);
    assert_eq!(parser.push("b"), [Piece::Content("<b".into())]);
}
