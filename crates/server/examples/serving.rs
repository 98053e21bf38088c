//! What the server adds to its engine, on one machine with its clients:
//!
//!     cargo run --release -p server --example serving -- [fake|demo] [--streams N] [--rounds N]
//!
//! `fake` is the fake model with a step of 5 ms, `demo` the model in models/demo on the CPU. Streams ask one
//! request after the other, through the engine alone and through HTTP in turn, so that a busy machine is the
//! same for both. The added time to the first byte is that of the same request: from sending it to the
//! first byte of content, less what the engine says it took to read the prompt.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use engine::fake::{FakeConfig, FakeCost, FakeDrafts, FakeModel, Pace};
use engine::{DraftPolicy, Engine, Event, Handle, Request};
use model::Model;
use model::qwen3_5::{Settings as ModelSettings, open};
use serde_json::{Value, json};
use server::http::{App, Bind, Listener, ModelInfo, Settings, Typed, serve};
use server::{Session, TextSide};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
/// Time of a step of the fake model.
const STEP: Duration = Duration::from_millis(5);
/// Tokens of a reply.
const TOKENS: usize = 128;
/// Requests of a stream in a round.
const REQUESTS: usize = 4;
const QUESTION: &str = "What is 37 + 58?";

type Failed = Box<dyn std::error::Error + Send + Sync>;

struct Args {
    demo: bool,
    streams: usize,
    rounds: usize,
}

fn args() -> Result<Args, String> {
    let mut args = Args { demo: false, streams: 8, rounds: 5 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let value = words.next().and_then(|value| value.parse().ok());
            value.filter(|value| (1..=64).contains(value)).ok_or(format!("{word}: a number from 1 to 64"))
        };
        match word.as_str() {
            "fake" => args.demo = false,
            "demo" => args.demo = true,
            "--streams" => args.streams = number()?,
            "--rounds" => args.rounds = number()?,
            _ => return Err(format!("{word} is not known")),
        }
    }
    Ok(args)
}

fn model(args: &Args, vocabulary: usize) -> Result<Box<dyn Model>, Failed> {
    if args.demo {
        let cpu = CpuSettings { threads: 2, isa: Isa::detect() };
        let settings = ModelSettings {
            slots: args.streams,
            snapshots: 0,
            context: 1024,
            pages: args.streams * 16,
            kv: KvForm::Int8,
            rows_max: 512,
            logits_rows_max: 256,
            mtp: false,
            image_tokens: 0,
        };
        let checkpoint = Checkpoint::open(Path::new(DEMO))?;
        return Ok(Box::new(open(&checkpoint, device::open("cpu", cpu)?, settings, &mut |_, _| {})?));
    }
    let pace = Pace::Sleep(FakeCost { step: STEP, ..FakeCost::default() });
    let mut config = FakeConfig { drafts: FakeDrafts::None, pace, ..FakeConfig::default() };
    config.spec.vocabulary = vocabulary;
    config.spec.slots = args.streams;
    Ok(Box::new(FakeModel::new(config)))
}

/// Tokens a second of all streams through the engine alone.
fn alone(engine: &Handle, prompt: &[u32], streams: usize) -> Result<f64, Failed> {
    let start = Instant::now();
    let stream = || -> Result<usize, Failed> {
        let mut count = 0;
        for _ in 0..REQUESTS {
            let mut request = Request::new(prompt.to_vec(), TOKENS);
            request.cache = false;
            request.sampling.ignore_eos = true;
            request.drafting.policy = DraftPolicy::Off;
            let (sender, events) = channel();
            let _ticket = engine.submit(request, Box::new(move |event| drop(sender.send(event))))?;
            for event in events {
                match event {
                    Event::Tokens { tokens, .. } => count += tokens.len(),
                    Event::Finished { .. } => break,
                    _ => {}
                }
            }
        }
        Ok(count)
    };
    let counts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..streams).map(|_| scope.spawn(stream)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
    })?;
    Ok(counts.iter().sum::<usize>() as f64 / start.elapsed().as_secs_f64())
}

/// Tokens a second through HTTP, and the added milliseconds to the first byte of each request.
async fn served(address: &str, streams: usize) -> Result<(f64, Vec<f64>), Failed> {
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..streams {
        let address = address.to_owned();
        tasks.spawn(async move {
            let mut socket = TcpStream::connect(address).await?;
            let mut added = Vec::new();
            for _ in 0..REQUESTS {
                added.push(ask(&mut socket).await?);
            }
            Ok::<_, Failed>(added)
        });
    }
    let mut added = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        added.extend(ended??);
    }
    Ok(((streams * REQUESTS * TOKENS) as f64 / start.elapsed().as_secs_f64(), added))
}

/// One streamed request on a connection that is kept; the added milliseconds to its first byte of content.
async fn ask(socket: &mut TcpStream) -> Result<f64, Failed> {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": QUESTION}], "stream": true,
        "max_tokens": TOKENS, "ignore_eos": true, "temperature": 0, "reasoning_effort": "none",
        "cache_prompt": false, "clary": {"timings": true}});
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    );
    let start = Instant::now();
    socket.write_all(format!("{head}{body}").as_bytes()).await?;
    let (mut text, mut first, mut bytes) = (String::new(), None, [0; 16384]);
    while !text.ends_with("0\r\n\r\n") {
        let count = socket.read(&mut bytes).await?;
        if count == 0 {
            return Err(format!("the connection ended early: {text}").into());
        }
        text.push_str(&String::from_utf8_lossy(&bytes[..count]));
        // The chunk before it names the role and has no content.
        let has_content = |text: &str| text.matches("\"content\":\"").count() > 1;
        if first.is_none() && has_content(&text) {
            first = Some(start.elapsed());
        }
    }
    let first = first.ok_or("a reply without content")?;
    let last = text.lines().rev().find_map(|line| line.strip_prefix("data: {")).ok_or("no event")?;
    let event: Value = serde_json::from_str(&format!("{{{last}"))?;
    let timings = &event["clary"]["timings"];
    let engine =
        timings["queue_ms"].as_f64().unwrap_or(f64::NAN) + timings["prefill_ms"].as_f64().unwrap_or(f64::NAN);
    Ok(first.as_secs_f64() * 1e3 - engine)
}

fn at(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * percent / 100).min(values.len() - 1)]
}

fn run(args: &Args) -> Result<(), Failed> {
    let text = TextSide::open(Path::new(DEMO))?;
    let model = model(args, text.tokenizer.vocab_size())?;
    let mut settings = engine::Settings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    settings.calibrate = false;
    let engine = Engine::start(model, settings)?;
    let prompt = text.tokenizer.encode_raw(&format!(
        "<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ))?;
    let mut typed = Typed::default();
    typed.drafting.policy = DraftPolicy::Off;
    let app = App::new(Settings::new(typed)?, "m");
    app.serve_model(Session::new(text, engine.clone()), ModelInfo::default(), None);
    let runtime =
        Arc::new(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?);
    let listener = runtime.block_on(Listener::bind(&Bind::Tcp("127.0.0.1:0".parse()?)))?;
    let address = listener.address().trim_start_matches("http://").to_owned();
    let (_orders, received) = tokio::sync::mpsc::channel(1);
    runtime.spawn(serve(listener, app, received));
    let (mut engines, mut servers, mut losses, mut added) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..=args.rounds {
        let engine = alone(&engine, &prompt, args.streams)?;
        let (server, more) = runtime.block_on(served(&address, args.streams))?;
        // The first round warms up.
        if round > 0 {
            engines.push(engine);
            servers.push(server);
            losses.push(100.0 * (1.0 - server / engine));
            added.extend(more);
        }
    }
    let name = if args.demo { "demo model on the CPU" } else { "fake model, 5 ms a step" };
    println!("{name}, {} streams, {TOKENS} tokens a reply, {} rounds", args.streams, args.rounds);
    println!("engine alone         {:8.1} tok/s (median)", at(&mut engines, 50));
    println!("through the server   {:8.1} tok/s (median)", at(&mut servers, 50));
    println!("loss                 {:8.2} %     (median of the rounds)", at(&mut losses, 50));
    println!(
        "added to first byte  {:8.2} ms    (median; 95 % {:.2} ms, {} requests)",
        at(&mut added.clone(), 50),
        at(&mut added, 95),
        args.streams * REQUESTS * args.rounds
    );
    Ok(())
}

fn main() -> ExitCode {
    let outcome = args().map_err(Into::into).and_then(|args| run(&args));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
