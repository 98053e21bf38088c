//! What the server adds to its engine, on one machine with its clients:
//!
//!     cargo run --release -p server --example serving -- [fake|demo] [--streams N] [--rounds N]
//!
//! `fake` is the fake model with a step of 5 ms, `demo` the model in models/demo on the CPU. Streams ask one
//! request after the other, through the engine alone and through HTTP in turn, so that a busy machine is the
//! same for both. Time to the first byte is from sending a request to the first token in the one case and to
//! the first byte of content in the other; replies have different lengths and requests come after pauses, so
//! that they come at all times of a step.

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
use serde_json::json;
use server::http::{App, Bind, Listener, ModelInfo, Settings, Typed, serve};
use server::{Session, TextSide};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
/// Time of a step of the fake model.
const STEP: Duration = Duration::from_millis(5);
/// Tokens of a reply, of the shortest and of the longest.
const TOKENS: [usize; 2] = [96, 160];
/// Requests of a stream in a round.
const REQUESTS: usize = 4;
const QUESTION: &str = "What is 37 + 58?";

/// Tokens of a stream's request: the same ones through the engine and through the server.
fn tokens(stream: usize, request: usize) -> usize {
    TOKENS[0] + (stream * 29 + request * 17) % (TOKENS[1] - TOKENS[0] + 1)
}

/// Pause before a request: without it every request would come when a step has just begun.
fn pause(stream: usize, request: usize) -> Duration {
    STEP * ((stream * 37 + request * 61) % 100) as u32 / 100
}

/// What a round gave: tokens a second of all streams, and the milliseconds to each request's first byte.
struct Round {
    rate: f64,
    first: Vec<f64>,
}

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
            card: false,
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

/// All streams through the engine alone.
fn alone(engine: &Handle, prompt: &[u32], streams: usize) -> Result<Round, Failed> {
    let start = Instant::now();
    let ask = |stream: usize| -> Result<(usize, Vec<f64>), Failed> {
        let (mut count, mut first) = (0, Vec::new());
        for number in 0..REQUESTS {
            let mut request = Request::new(prompt.to_vec(), tokens(stream, number));
            request.cache = false;
            request.sampling.ignore_eos = true;
            request.drafting.policy = DraftPolicy::Off;
            let (sender, events) = channel();
            std::thread::sleep(pause(stream, number));
            let sent = Instant::now();
            let _ticket = engine.submit(request, Box::new(move |event| drop(sender.send(event))))?;
            let mut time = None;
            for event in events {
                match event {
                    Event::Tokens { tokens, .. } => {
                        count += tokens.len();
                        time.get_or_insert_with(|| sent.elapsed().as_secs_f64() * 1e3);
                    }
                    Event::Finished { .. } => break,
                    _ => {}
                }
            }
            first.extend(time);
        }
        Ok((count, first))
    };
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..streams).map(|number| scope.spawn(move || ask(number))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
    })?;
    let count: usize = all.iter().map(|(count, _)| count).sum();
    let first = all.into_iter().flat_map(|(_, first)| first).collect();
    Ok(Round { rate: count as f64 / start.elapsed().as_secs_f64(), first })
}

/// The same through HTTP.
async fn served(address: &str, streams: usize) -> Result<Round, Failed> {
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for stream in 0..streams {
        let address = address.to_owned();
        tasks.spawn(async move {
            let mut socket = TcpStream::connect(address).await?;
            let mut first = Vec::new();
            for request in 0..REQUESTS {
                tokio::time::sleep(pause(stream, request)).await;
                first.push(ask(&mut socket, tokens(stream, request)).await?);
            }
            Ok::<_, Failed>(first)
        });
    }
    let mut first = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        first.extend(ended??);
    }
    let count: usize = (0..streams * REQUESTS).map(|at| tokens(at / REQUESTS, at % REQUESTS)).sum();
    Ok(Round { rate: count as f64 / start.elapsed().as_secs_f64(), first })
}

/// One streamed request on a connection that is kept; the milliseconds to its first byte of content.
async fn ask(socket: &mut TcpStream, tokens: usize) -> Result<f64, Failed> {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": QUESTION}], "stream": true,
        "max_tokens": tokens, "ignore_eos": true, "temperature": 0, "reasoning_effort": "none",
        "cache_prompt": false});
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
    Ok(first.ok_or("a reply without content")?.as_secs_f64() * 1e3)
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
    let (mut engines, mut servers, mut losses) = (Vec::new(), Vec::new(), Vec::new());
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for round in 0..=args.rounds {
        let engine = alone(&engine, &prompt, args.streams)?;
        let server = runtime.block_on(served(&address, args.streams))?;
        // The first round warms up.
        if round > 0 {
            engines.push(engine.rate);
            servers.push(server.rate);
            losses.push(100.0 * (1.0 - server.rate / engine.rate));
            before.extend(engine.first);
            after.extend(server.first);
        }
    }
    let name = if args.demo { "demo model on the CPU" } else { "fake model, 5 ms a step" };
    let (streams, rounds, requests) = (args.streams, args.rounds, before.len());
    println!("{name}, {streams} streams, {rounds} rounds, {requests} requests each way; medians");
    println!(
        "engine alone        {:8.1} tok/s  first token {:6.2} ms",
        at(&mut engines, 50),
        at(&mut before, 50)
    );
    println!(
        "through the server  {:8.1} tok/s  first byte  {:6.2} ms",
        at(&mut servers, 50),
        at(&mut after, 50)
    );
    println!(
        "loss                {:8.2} %      added       {:6.2} ms",
        at(&mut losses, 50),
        at(&mut after, 50) - at(&mut before, 50)
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
