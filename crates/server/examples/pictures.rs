//! What a large picture does to the streams beside it:
//!
//!     cargo run --release -p server --example pictures -- [ROUNDS]
//!
//! Four streams of the model in models/demo run through HTTP on the CPU, while a fifth client posts a JPEG
//! file of 24 megapixels and about 20 MB, another one every time. Told are the gaps between the pieces of a
//! stream: the largest, the 99th and the 50th of a hundred, in rounds with a picture and in rounds without,
//! in turn, so that a busy machine is the same for both. Streams and picture ask again as soon as they have
//! their replies.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use checkpoint::Checkpoint;
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use engine::{DraftPolicy, Engine};
use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, ImageEncoder};
use model::qwen3_5::{Settings as ModelSettings, open};
use serde_json::{Value, json};
use server::http::{App, Bind, Listener, ModelInfo, Settings, Typed, serve};
use server::{Session, TextSide, Vision, VisionSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
const STREAMS: usize = 4;
/// Tokens of a stream's reply.
const TOKENS: usize = 400;
/// Time of a round.
const ROUND: Duration = Duration::from_secs(4);
/// Size of the picture, and the quality at which its noise fills about 20 MB.
const PICTURE: [u32; 2] = [6000, 4000];
const QUALITY: u8 = 86;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// A JPEG file of noise over a slope; another one for every seed.
fn picture(seed: u32) -> Result<Vec<u8>, Failed> {
    let [width, height] = PICTURE;
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut pixels = Vec::with_capacity((width * height * 3) as usize);
    for at in 0..width * height {
        // Xorshift.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        let base = at % width * 128 / width;
        pixels.extend(state.to_le_bytes()[..3].iter().map(|noise| (base + u32::from(noise >> 2)) as u8));
    }
    let mut file = Vec::new();
    let encoder = JpegEncoder::new_with_quality(&mut file, QUALITY);
    encoder.write_image(&pixels, width, height, ExtendedColorType::Rgb8)?;
    Ok(file)
}

/// Sends one request and calls `seen` for every piece of the reply.
async fn ask(address: &str, body: &Value, mut seen: impl FnMut(&str)) -> Result<String, Failed> {
    let mut socket = TcpStream::connect(address).await?;
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await?;
    socket.write_all(body.as_bytes()).await?;
    let (mut text, mut bytes) = (String::new(), [0; 16384]);
    loop {
        let count = socket.read(&mut bytes).await?;
        if count == 0 {
            break;
        }
        let piece = String::from_utf8_lossy(&bytes[..count]);
        seen(&piece);
        text.push_str(&piece);
    }
    match text.starts_with("HTTP/1.1 200") {
        true => Ok(text),
        false => Err(text.into()),
    }
}

/// Milliseconds between the pieces of one stream's replies, until the round ends.
async fn stream(
    address: String,
    ended: Arc<AtomicBool>,
    number: usize,
    unending: Value,
) -> Result<Vec<f64>, Failed> {
    let content = format!("Count to {}.", 100 + number);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": content}], "stream": true,
        "max_tokens": TOKENS, "logit_bias": unending, "temperature": 1, "reasoning_effort": "none"});
    let mut gaps = Vec::new();
    while !ended.load(Relaxed) {
        let mut last: Option<Instant> = None;
        ask(&address, &body, |piece| {
            if piece.contains("\"content\":\"") {
                let now = Instant::now();
                gaps.extend(last.map(|last| (now - last).as_secs_f64() * 1e3));
                last = Some(now);
            }
        })
        .await?;
    }
    Ok(gaps)
}

/// Milliseconds that requests with a picture took.
async fn pictures(address: String, ended: Arc<AtomicBool>, files: Vec<String>) -> Result<Vec<f64>, Failed> {
    let mut times = Vec::new();
    for url in files.iter().cycle() {
        if ended.load(Relaxed) {
            break;
        }
        let content = json!([{"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": url}}]);
        let body = json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4,
            "cache_prompt": false, "reasoning_effort": "none"});
        let start = Instant::now();
        ask(&address, &body, |_| {}).await?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

/// One round: gaps of all streams, and times of requests with a picture.
async fn round(address: &str, unending: &Value, files: Vec<String>) -> Result<(Vec<f64>, Vec<f64>), Failed> {
    let ended = Arc::new(AtomicBool::new(false));
    let mut streams = tokio::task::JoinSet::new();
    for number in 0..STREAMS {
        streams.spawn(stream(address.to_owned(), Arc::clone(&ended), number, unending.clone()));
    }
    let asked = tokio::spawn(pictures(address.to_owned(), Arc::clone(&ended), files));
    tokio::time::sleep(ROUND).await;
    ended.store(true, Relaxed);
    let times = asked.await??;
    let mut gaps = Vec::new();
    while let Some(found) = streams.join_next().await {
        gaps.extend(found??);
    }
    Ok((gaps, times))
}

fn session() -> Result<Session, Failed> {
    let dir = Path::new(DEMO);
    let settings = ModelSettings {
        slots: STREAMS + 2,
        snapshots: 8,
        context: 1024,
        pages: (STREAMS + 2) * 16,
        kv: KvForm::Int8,
        rows_max: 512,
        logits_rows_max: 64,
        mtp: false,
        image_tokens: 64,
        card: false,
    };
    let cpu = CpuSettings { threads: 2, isa: Isa::detect() };
    let checkpoint = Checkpoint::open(dir)?;
    let qwen = open(&checkpoint, device::open("cpu", cpu)?, settings, &mut |_, _| {})?;
    let text = TextSide::open(dir)?;
    let mut settings = engine::Settings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    settings.calibrate = false;
    let engine = Engine::start(Box::new(qwen), settings)?;
    let json = std::fs::read(dir.join("preprocessor_config.json"))?;
    let vision = VisionSettings::new(&serde_json::from_slice(&json)?, None)?;
    Ok(Session::new(text, engine).with_vision(Vision::new(vision)?))
}

fn tell(name: &str, gaps: &mut [f64]) {
    gaps.sort_by(f64::total_cmp);
    let at = |percent: usize| gaps[(gaps.len() * percent / 100).min(gaps.len() - 1)];
    println!("| {name} | {} | {:.1} | {:.1} | {:.1} |", gaps.len(), at(50), at(99), at(100));
}

fn run(rounds: usize) -> Result<(), Failed> {
    let files: Vec<Vec<u8>> = (0..4).map(picture).collect::<Result<_, _>>()?;
    println!("pictures of {} to {} bytes", files[0].len(), files[3].len());
    let files: Vec<String> =
        files.iter().map(|file| format!("data:image/jpeg;base64,{}", STANDARD.encode(file))).collect();
    // Without its ends the model goes on; unseen tokens would be gaps.
    let ends = TextSide::open(Path::new(DEMO))?.defaults.stop_ids;
    let unending = ends.iter().map(|id| (id.to_string(), json!(-100))).collect::<serde_json::Map<_, _>>();
    let unending = Value::Object(unending);
    let mut typed = Typed::default();
    typed.drafting.policy = DraftPolicy::Off;
    let app = App::new(Settings::new(typed)?, "m");
    app.serve_model(session()?, ModelInfo::default(), None);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = runtime.block_on(Listener::bind(&Bind::Tcp("127.0.0.1:0".parse()?)))?;
    let address = listener.address().trim_start_matches("http://").to_owned();
    let (_orders, received) = tokio::sync::mpsc::channel(1);
    runtime.spawn(serve(listener, app, received));
    let (mut with, mut without, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        without.extend(runtime.block_on(round(&address, &unending, Vec::new()))?.0);
        let (gaps, took) = runtime.block_on(round(&address, &unending, files.clone()))?;
        with.extend(gaps);
        times.extend(took);
    }
    println!("| gaps, ms | pieces | median | 99 % | longest |\n| --- | --- | --- | --- | --- |");
    tell("four streams", &mut without);
    tell("beside pictures", &mut with);
    tell("requests with a picture", &mut times);
    Ok(())
}

fn main() -> ExitCode {
    let rounds = std::env::args().nth(1).map_or(Ok(3), |word| word.parse());
    match rounds.map_err(Failed::from).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
