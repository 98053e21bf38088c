//! Constrained replies from end to end: on the fake model drafts change nothing, on the demo model the answer
//! is valid whatever the reasoning was.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use checkpoint::Checkpoint;
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use engine::fake::{FakeConfig, FakeDrafts, FakeModel};
use engine::{DraftPolicy, Drafting, Engine, Handle, Settings};
use serde_json::{Value, json};
use server::{Conversation, Finish, Options, Outcome, Session, TextSide, Update};
use text::{Answer, Calls, Grammar, GrammarCompiler, Message, Role, Tool};

const WAIT: Duration = Duration::from_secs(60);

fn dir() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"))
}

fn settings(text: &TextSide) -> Settings {
    let mut settings = Settings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    settings.calibrate = false;
    settings
}

fn compiler(text: &TextSide) -> GrammarCompiler {
    GrammarCompiler::new(&text.tokenizer, &text.defaults.stop_ids).unwrap()
}

fn fake(text: &TextSide, drafts: FakeDrafts) -> Handle {
    let mut config = FakeConfig { drafts, ..FakeConfig::default() };
    config.spec.vocabulary = text.tokenizer.vocab_size();
    Engine::start(Box::new(FakeModel::new(config)), settings(text)).unwrap()
}

fn demo(text: &TextSide) -> Handle {
    let settings_of_model = model::qwen3_5::Settings {
        slots: 1,
        snapshots: 4,
        context: 1,
        pages: 2,
        kv: KvForm::Int8,
        rows_max: 128,
        logits_rows_max: 64,
        mtp: true,
        image_tokens: 0,
        card: false,
    };
    let cpu = device::open("cpu", CpuSettings { threads: 2, isa: Isa::detect() }).unwrap();
    let checkpoint = Checkpoint::open(dir()).unwrap();
    let settings_of_model = settings_of_model.with_context(768);
    let qwen = model::qwen3_5::open(&checkpoint, cpu, settings_of_model, &mut |_, _| {}).unwrap();
    Engine::start(Box::new(qwen), settings(text)).unwrap()
}

fn outcome(session: &Session, question: &str, tools: Vec<Tool>, options: &Options) -> Outcome {
    let messages = vec![Message::text(Role::User, question)];
    let mut stream = session.start(Conversation { messages, tools }, options).unwrap();
    loop {
        match stream.next(WAIT) {
            Update::Finished(outcome) => return *outcome,
            Update::Idle => panic!("nothing came in {WAIT:?}"),
            Update::Piece(_) | Update::Admitted(_) => {}
        }
    }
}

fn options(thinking: bool, drafts: bool, grammar: &Grammar) -> Options {
    let policy = if drafts { DraftPolicy::Fixed(3) } else { DraftPolicy::Off };
    Options {
        thinking: Some(thinking),
        max_tokens: Some(300),
        drafting: Drafting { policy, ..Drafting::default() },
        grammar: Some(grammar.clone()),
        ..Options::default()
    }
}

/// Small enough that even a model that writes at random comes to an end.
fn small() -> Value {
    json!({"type": "object", "properties": {"ok": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99}, "word": {"type": "string", "maxLength": 5}},
        "required": ["ok", "size", "word"], "additionalProperties": false})
}

fn is_small(value: &Value) -> bool {
    value.as_object().is_some_and(|map| map.len() == 3)
        && value["ok"].is_boolean()
        && value["size"].as_u64().is_some_and(|size| size < 100)
        && value["word"].as_str().is_some_and(|word| word.chars().count() <= 5)
}

#[test]
fn drafted_equals_plain_under_a_constraint() {
    let text = TextSide::open(dir()).unwrap();
    let compiler = compiler(&text);
    let grammar = compiler.compile(Some(&Answer::Schema(small())), None).unwrap();
    let plain = Session::new(text.clone(), fake(&text, FakeDrafts::None));
    let wanted: Vec<Vec<u32>> = (0..4)
        .map(|seed| {
            let mut options = options(false, false, &grammar);
            options.sampling.temperature = 1.0;
            options.sampling.seed = seed;
            let outcome = outcome(&plain, "Hello", Vec::new(), &options);
            assert_eq!(outcome.finish, Finish::Stop);
            let value = serde_json::from_str(&outcome.reply.content).unwrap();
            assert!(is_small(&value), "{value}");
            outcome.ids
        })
        .collect();
    for drafts in [FakeDrafts::Right, FakeDrafts::Wrong, FakeDrafts::Random, FakeDrafts::Sometimes(70)] {
        let session = Session::new(text.clone(), fake(&text, drafts));
        for (seed, wanted) in wanted.iter().enumerate() {
            for first in [1, 3] {
                let mut options = options(false, true, &grammar);
                options.drafting.first = first;
                options.sampling.temperature = 1.0;
                options.sampling.seed = seed as u64;
                let outcome = outcome(&session, "Hello", Vec::new(), &options);
                assert_eq!(&outcome.ids, wanted, "{drafts:?} seed {seed}");
            }
        }
    }
}

#[test]
fn the_demo_model_answers_in_the_schema() {
    let text = TextSide::open(dir()).unwrap();
    let compiler = compiler(&text);
    let session = Session::new(text.clone(), demo(&text));
    let schema = json!({"type": "object", "properties": {"title": {"type": "string", "maxLength": 40},
        "author": {"type": "string", "maxLength": 40}}, "required": ["title", "author"],
        "additionalProperties": false});
    let extract = "Extract JSON with the keys title (string), author (string) from this text: \
                   Ralf wrote 'The dark shirt' in 1935. It is not available.";
    // One question has to do with its schema, the other does not.
    for (question, schema) in [(extract, schema), ("What is 37 + 58?", small())] {
        let grammar = compiler.compile(Some(&Answer::Schema(schema.clone())), None).unwrap();
        for thinking in [false, true] {
            let mut texts = Vec::new();
            for drafts in [false, true] {
                let outcome = outcome(&session, question, Vec::new(), &options(thinking, drafts, &grammar));
                let reply = &outcome.reply;
                assert_eq!(outcome.finish, Finish::Stop, "{reply:?}");
                let value: Value = serde_json::from_str(&reply.content).unwrap();
                let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
                let wanted: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
                assert_eq!(keys, wanted, "{reply:?}");
                assert_eq!(!reply.reasoning.is_empty(), thinking, "{reply:?}");
                texts.push((reply.content.clone(), reply.reasoning.clone()));
            }
            assert_eq!(texts[0], texts[1], "drafts changed the reply");
            if question == extract {
                let value: Value = serde_json::from_str(&texts[0].0).unwrap();
                assert_eq!(value, json!({"title": "The dark shirt", "author": "Ralf"}), "{}", texts[0].0);
            }
        }
    }
}

#[test]
fn the_demo_model_makes_the_call_it_must() {
    let text = TextSide::open(dir()).unwrap();
    let compiler = compiler(&text);
    let session = Session::new(text.clone(), demo(&text));
    let tools =
        Tool::parse_all(&json!([{"type": "function", "function": {"name": "set_light", "strict": true,
        "parameters": {"type": "object", "properties": {"room": {"enum": ["kitchen", "hall"]},
            "level": {"type": "integer", "minimum": 0, "maximum": 10}}, "required": ["room", "level"]}}}]))
        .unwrap();
    let calls = Calls { tools: &tools, required: true, parallel: false };
    let grammar = compiler.compile(None, Some(&calls)).unwrap();
    for (thinking, drafts) in [(false, false), (true, true)] {
        let options = options(thinking, drafts, &grammar);
        let outcome = outcome(&session, "What is 37 + 58?", tools.clone(), &options);
        assert_eq!(outcome.finish, Finish::ToolCalls, "{:?}", outcome.reply);
        let [call] = &outcome.reply.calls[..] else { panic!("one call: {:?}", outcome.reply) };
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        assert_eq!(call.name, "set_light");
        assert!(["kitchen", "hall"].contains(&arguments["room"].as_str().unwrap()), "{arguments}");
        assert!(arguments["level"].as_u64().unwrap() <= 10, "{arguments}");
        assert_eq!(outcome.reply.content, "");
    }
}
