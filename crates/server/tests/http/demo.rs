//! The demo model on the CPU device, through the whole server: what it says, and that nothing around it
//! changes a word.

use std::path::Path;

use checkpoint::Checkpoint;
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use engine::{Engine, Settings as EngineSettings};
use model::qwen3_5::{Settings, open};
use serde_json::{Value, json};
use server::{Session, Vision, VisionSettings};

use crate::support::{Server, comparable, joined, text_side};

/// A server over the demo model with 2 slots.
fn server() -> Server {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
    let settings = Settings {
        slots: 2,
        snapshots: 8,
        context: 1,
        pages: 2,
        kv: KvForm::Int8,
        rows_max: 128,
        logits_rows_max: 64,
        mtp: true,
        image_tokens: 64,
        card: false,
    };
    let cpu = device::open("cpu", CpuSettings { threads: 2, isa: Isa::detect() }).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let qwen = open(&checkpoint, cpu, settings.with_context(1024), &mut |_, _| {}).unwrap();
    let text = text_side();
    let mut settings = EngineSettings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    settings.calibrate = false;
    let engine = Engine::start(Box::new(qwen), settings).unwrap();
    let json = std::fs::read(dir.join("preprocessor_config.json")).unwrap();
    let vision = VisionSettings::new(&serde_json::from_slice(&json).unwrap(), None).unwrap();
    assert!(vision.tokens_max <= 64, "{}", vision.tokens_max);
    Server::over(Session::new(text, engine).with_vision(Vision::new(vision).unwrap()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_model_answers() {
    let server = server();
    let ask = async |fields: Value| server.chat(fields).await.ok();
    // Plain, drafted, streamed, resumed from the cache, in company: one text.
    let question =
        json!({"messages": [{"role": "user", "content": "Subtract 3 from 871."}], "max_tokens": 60});
    let with = |more: Value| {
        let mut fields = question.clone();
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    };
    let plain = ask(with(json!({"speculative": {"enabled": false}, "cache_prompt": false}))).await;
    assert_eq!(plain["choices"][0]["message"]["content"], "871 - 3 = 868", "{plain}");
    let drafted = ask(with(json!({"speculative": {"max_draft": 3}}))).await;
    assert_eq!(comparable(&drafted), comparable(&plain));
    let (events, done) = server.chat(with(json!({"stream": true}))).await.events();
    assert!(done);
    assert_eq!(joined(&events), comparable(&plain));
    let company = async || server.chat(json!({"temperature": 1, "seed": 5, "max_tokens": 30})).await.ok();
    let (other, again) = tokio::join!(company(), ask(with(json!({"cache_prompt": false}))));
    assert_eq!(comparable(&again), comparable(&plain));
    assert_eq!(comparable(&company().await), comparable(&other));
    // Reasoning comes apart.
    let thought = ask(with(json!({"reasoning_effort": "high", "max_tokens": 200}))).await;
    let message = &thought["choices"][0]["message"];
    assert!(message["reasoning_content"].as_str().is_some_and(|text| !text.is_empty()), "{thought}");
    assert!(message["content"].as_str().unwrap().contains("868"), "{thought}");
}

/// A picture on real weights: plain, drafted, cached, streamed and in company are one text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_model_sees() {
    use base64::Engine as _;
    let server = server();
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/eval/images"));
    let part = |name: &str| {
        let data = base64::engine::general_purpose::STANDARD.encode(std::fs::read(dir.join(name)).unwrap());
        json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}})
    };
    let ask = async |name: &str, words: &str, more: Value| {
        let content = json!([part(name), {"type": "text", "text": words}]);
        let mut fields = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 30,
            "temperature": 0, "reasoning_effort": "none"});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.chat(fields).await
    };
    let (digit, crosses) = ("Which digit is in the picture?", "What is in the picture, and how many?");
    let plain = json!({"speculative": {"enabled": false}, "cache_prompt": false});
    let first = ask("dev-248-0.png", digit, plain.clone()).await.ok();
    assert_eq!(first["choices"][0]["message"]["content"], "The digit is 5.", "{first}");
    let drafted = json!({"speculative": {"max_draft": 3}});
    for more in [drafted.clone(), drafted.clone(), json!({})] {
        let again = ask("dev-248-0.png", digit, more).await.ok();
        assert_eq!(comparable(&again), comparable(&first));
    }
    let (events, done) = ask("dev-248-0.png", digit, json!({"stream": true})).await.events();
    assert!(done);
    assert_eq!(joined(&events), comparable(&first));
    let other = ask("dev-280-0.png", crosses, plain.clone()).await.ok();
    assert_eq!(other["choices"][0]["message"]["content"], "There are 6 green crosses.", "{other}");
    let (one, two) = tokio::join!(
        ask("dev-248-0.png", digit, drafted.clone()),
        ask("dev-280-0.png", crosses, drafted.clone())
    );
    assert_eq!((comparable(&one.ok()), comparable(&two.ok())), (comparable(&first), comparable(&other)));
}

/// E5 on real weights: scores of a prompt are those of decoding it, digit by digit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scored_equals_decoded_on_real_weights() {
    let server = server();
    let prompt = server.text.tokenizer.encode_raw("<|im_start|>user\nAdd 2 and 3.<|im_end|>\n").unwrap();
    let fields = json!({"prompt": prompt, "logprobs": 2, "max_tokens": 10, "ignore_eos": true});
    let decoded = server.complete(fields).await.ok()["choices"][0]["logprobs"].clone();
    let text = |token: &Value| server.text.tokenizer.encode_raw(token.as_str().unwrap()).unwrap();
    let generated = decoded["tokens"].as_array().unwrap().iter().flat_map(text);
    let all: Vec<u32> = prompt.iter().copied().chain(generated).collect();
    assert_eq!(all.len(), prompt.len() + 10, "every token is whole text: {decoded}");
    let fields = json!({"prompt": all, "logprobs": 2, "echo": true, "max_tokens": 0});
    let scored = server.complete(fields).await.ok()["choices"][0]["logprobs"].clone();
    for name in ["token_logprobs", "top_logprobs"] {
        assert_eq!(
            scored[name].as_array().unwrap()[prompt.len()..],
            decoded[name].as_array().unwrap()[..],
            "{name}"
        );
    }
}
