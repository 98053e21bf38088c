//! A server over the fake model, in process or on a socket, and a client that sends exactly what it is told.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::Response;
use engine::fake::{FakeConfig, FakeCost, FakeDrafts, FakeModel, Faults, Pace};
use engine::{Engine, Handle, Settings as EngineSettings};
use model::{Draft, DraftAsk, Draw, Drawn, Features, ImageRow, ImageSpec, Logits, Model, ModelError};
use model::{Picture, SlotId, SnapshotId, Spec, Window};
use serde_json::{Map, Value, json};
use server::http::{App, Grammar, Listener, ModelInfo, Settings, Typed, app, serve};
use server::{Session, TextSide, Vision, VisionSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tower::ServiceExt;

pub const MODEL: &str = "demo";
const WAIT: Duration = Duration::from_secs(20);

pub fn text_side() -> TextSide {
    TextSide::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"))).unwrap()
}

/// What the model says instead of what the fake would draw; an end token follows.
pub type Script = Arc<Mutex<Option<Vec<u32>>>>;

/// The fake, whose draws a script may replace.
struct Scripted {
    inner: FakeModel,
    script: Script,
    end: u32,
    /// Slot of each row of logits, where it is the last of its window.
    rows: Vec<Option<usize>>,
    /// Tokens each slot has said.
    said: Vec<usize>,
    /// Sequences so far, and the token that takes the place of the second one in all but the first.
    begun: usize,
    flip: Option<u32>,
}

impl Model for Scripted {
    fn spec(&self) -> &Spec {
        self.inner.spec()
    }
    fn step(&mut self, windows: &[Window]) -> Result<usize, ModelError> {
        self.step_images(windows, &[])
    }
    fn step_images(&mut self, windows: &[Window], images: &[ImageRow]) -> Result<usize, ModelError> {
        self.rows.clear();
        for window in windows {
            let rows = match window.logits {
                Logits::None => 0,
                Logits::Last => 1,
                Logits::All => window.rows.len(),
            };
            let slot = window.slot.0 as usize;
            self.rows.extend((0..rows).map(|row| (row + 1 == rows).then_some(slot)));
        }
        self.inner.step_images(windows, images)
    }
    fn image_spec(&self) -> Option<ImageSpec> {
        self.inner.image_spec()
    }
    fn encode(&mut self, pictures: &[Arc<Picture>]) -> Result<(), ModelError> {
        self.inner.encode(pictures)
    }
    fn encode_next(&mut self, rows: usize) -> Result<Option<Vec<Features>>, ModelError> {
        self.inner.encode_next(rows)
    }
    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Drawn>, ModelError> {
        let mut drawn = self.inner.draw(draws)?;
        if let Some(script) = &*self.script.lock().unwrap() {
            for (draw, drawn) in draws.iter().zip(&mut drawn) {
                if let (Some(Some(slot)), Some(token)) = (self.rows.get(draw.row), &mut drawn.token) {
                    let flipped = self.flip.filter(|_| self.begun > 1 && self.said[*slot] == 1);
                    let next = flipped.or(script.get(self.said[*slot]).copied()).unwrap_or(self.end);
                    let allows = |mask: &Vec<u32>| mask[next as usize / 32] >> (next % 32) & 1 == 1;
                    if draw.mask.as_ref().is_none_or(allows) {
                        *token = next;
                        self.said[*slot] += 1;
                    }
                }
            }
        }
        Ok(drawn)
    }
    fn read_logits(&mut self, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        self.inner.read_logits(row, out)
    }
    fn keep(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), ModelError> {
        self.inner.keep(slot, rows)
    }
    fn draft(&mut self, asks: &[DraftAsk]) -> Result<Vec<Draft>, ModelError> {
        self.inner.draft(asks)
    }
    fn save(&mut self, slot: SlotId, into: SnapshotId) -> Result<(), ModelError> {
        self.inner.save(slot, into)
    }
    fn load(&mut self, slot: SlotId, from: Option<SnapshotId>) -> Result<(), ModelError> {
        self.said[slot.0 as usize] = 0;
        self.begun += 1;
        self.inner.load(slot, from)
    }
    fn export_snapshot(&mut self, from: SnapshotId) -> Result<Vec<u8>, ModelError> {
        self.inner.export_snapshot(from)
    }
    fn import_snapshot(&mut self, into: SnapshotId, bytes: &[u8]) -> Result<(), ModelError> {
        self.inner.import_snapshot(into, bytes)
    }
    fn export_page(&mut self, page: u32) -> Result<Vec<u8>, ModelError> {
        self.inner.export_page(page)
    }
    fn import_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ModelError> {
        self.inner.import_page(page, bytes)
    }
}

/// How a test's server differs from the default.
#[derive(Default)]
pub struct Setup {
    pub typed: Typed,
    /// Time of a step.
    pub step: Duration,
    /// Time of a slice of encoding, for each row of work.
    pub image: Duration,
    pub drafts: Option<FakeDrafts>,
    pub slots: Option<usize>,
    /// Tokens of the longest sequence.
    pub context: Option<usize>,
    pub queue_max: Option<usize>,
    pub queue_timeout: Option<Duration>,
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Take pictures.
    pub vision: bool,
    /// Leave the model out.
    pub loading: bool,
    /// What a faulty device says as the second token of every scripted reply but the first.
    pub flip: Option<u32>,
}

/// What pictures the fake model takes.
const IMAGES: ImageSpec =
    ImageSpec { tokens_max: 400, pictures_max: 4, patch: 16, merge: 2, token_bytes: 4, patch_work: 8 };

/// Preparation for the fake model: 4 to 320 tokens a picture.
fn vision() -> Vision {
    let json = json!({"size": {"shortest_edge": 4096, "longest_edge": 327680}});
    Vision::new(VisionSettings::new(&json, None).unwrap()).unwrap()
}

/// A server over the fake model.
pub struct Server {
    pub app: App,
    pub router: Router,
    pub engine: Handle,
    pub script: Script,
    pub faults: Arc<Faults>,
    pub text: TextSide,
}

/// A whole response.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text());
        self.json()
    }
    /// Status, code and param of an OpenAI error.
    #[track_caller]
    pub fn error(&self) -> (u16, String, Option<String>) {
        let error = &self.json()["error"];
        let text = |name: &str| error[name].as_str().map(str::to_owned);
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.text());
        (self.status.as_u16(), text("code").expect("a code"), text("param"))
    }
    /// The data of a stream, and whether it ended with `[DONE]`.
    #[track_caller]
    pub fn events(&self) -> (Vec<Value>, bool) {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text());
        assert_eq!(self.headers["content-type"], "text/event-stream");
        sse(self.text())
    }
}

/// Data lines of a stream, and whether it ended with `[DONE]`.
pub fn sse(text: &str) -> (Vec<Value>, bool) {
    let mut events = Vec::new();
    let mut done = false;
    for block in text.split("\n\n").filter(|block| !block.is_empty()) {
        let Some(data) = block.strip_prefix("data: ") else {
            assert!(block.starts_with(':'), "{block:?}");
            continue;
        };
        assert!(!done, "nothing follows [DONE]: {block:?}");
        match data {
            "[DONE]" => done = true,
            data => events.push(serde_json::from_str(data).unwrap()),
        }
    }
    (events, done)
}

impl Server {
    pub fn new() -> Self {
        Self::with(Setup::default())
    }

    pub fn with(setup: Setup) -> Self {
        let text = text_side();
        let cost = FakeCost { step: setup.step, image: setup.image, ..FakeCost::default() };
        let is_free = setup.step.is_zero() && setup.image.is_zero();
        let pace = if is_free { Pace::Free } else { Pace::Sleep(cost) };
        let drafts = setup.drafts.unwrap_or(FakeDrafts::None);
        let mut config = FakeConfig { drafts, pace, ..FakeConfig::default() };
        config.spec.vocabulary = text.tokenizer.vocab_size();
        config.spec.slots = setup.slots.unwrap_or(config.spec.slots);
        if let Some(context) = setup.context {
            // As many pages for each token as before.
            config.spec.pages *= context.div_ceil(config.spec.context_max);
            config.spec.context_max = context;
        }
        config.images = setup.vision.then_some(IMAGES);
        let fake = FakeModel::new(config);
        let (faults, script) = (fake.faults(), Script::default());
        let slots = fake.spec().slots;
        let end = text.tokenizer.control_id("<|im_end|>").unwrap();
        let scripted = Scripted {
            inner: fake,
            script: script.clone(),
            end,
            rows: Vec::new(),
            said: vec![0; slots],
            begun: 0,
            flip: setup.flip,
        };
        let mut settings = EngineSettings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
        settings.calibrate = false;
        settings.queue_max = setup.queue_max.unwrap_or(settings.queue_max);
        settings.queue_timeout = setup.queue_timeout.unwrap_or(settings.queue_timeout);
        let engine = Engine::start(Box::new(scripted), settings).unwrap();
        let mut typed = setup.typed;
        if setup.drafts.is_none() {
            // A script knows the last row of a window only.
            typed.drafting.policy = engine::DraftPolicy::Off;
        }
        let state = App::new(Settings::new(typed).unwrap(), MODEL);
        if !setup.loading {
            let info = ModelInfo {
                backend: "cpu".into(),
                build: "test".into(),
                digest: "sha256:00".into(),
                kv: "int8".into(),
                contracts: vec!["E1", "E2"],
                memory: vec![("weights", 5)],
                ..ModelInfo::default()
            };
            let mut session = Session::new(text.clone(), engine.clone());
            if setup.vision {
                session = session.with_vision(vision());
            }
            state.serve_model(session, info, setup.grammar);
        }
        Self { router: app(state.clone()), app: state, engine, script, faults, text }
    }

    /// A server over another model. Scripts and faults have no effect on it.
    pub fn over(session: Session) -> Self {
        let state = App::new(Settings::new(Typed::default()).unwrap(), MODEL);
        let (text, engine) = (session.text().clone(), session.engine().clone());
        state.serve_model(session, ModelInfo::default(), None);
        Self {
            router: app(state.clone()),
            app: state,
            engine,
            script: Script::default(),
            faults: Arc::default(),
            text,
        }
    }

    /// Lets the model say a text, control spellings included, and then end.
    pub fn say(&self, text: &str) {
        self.say_ids(self.text.tokenizer.encode_raw(text).unwrap());
    }

    pub fn say_ids(&self, ids: Vec<u32>) {
        *self.script.lock().unwrap() = Some(ids);
    }

    /// An answer whose body nobody has read yet.
    pub async fn unread(&self, request: Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub async fn call(&self, request: Request<Body>) -> Answer {
        let response = self.unread(request).await;
        let (parts, body) = response.into_parts();
        let body =
            tokio::time::timeout(WAIT, to_bytes(body, usize::MAX)).await.expect("a whole body in time");
        Answer { status: parts.status, headers: parts.headers, body: body.unwrap().to_vec() }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(request("GET", path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, body.to_string()).await
    }

    pub async fn post_text(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.call(posted(path, body)).await
    }

    /// A chat of one question, with further fields.
    pub async fn chat(&self, fields: Value) -> Answer {
        self.post("/v1/chat/completions", &chat(fields)).await
    }

    pub async fn complete(&self, fields: Value) -> Answer {
        let mut body = json!({"model": MODEL, "temperature": 0});
        merge(&mut body, fields);
        self.post("/v1/completions", &body).await
    }

    /// Waits until no slot is taken and nothing waits.
    pub async fn idle(&self) {
        self.until("all slots idle", |status| status.prefilling + status.decoding + status.queued == 0).await;
    }

    pub async fn until(&self, what: &str, reached: impl Fn(&engine::Status) -> bool) {
        let deadline = tokio::time::Instant::now() + WAIT;
        while !reached(&self.engine.status()) {
            assert!(tokio::time::Instant::now() < deadline, "{what}: {:?}", self.engine.status());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Puts the server on a socket of its own.
    pub async fn listen(&self) -> Live {
        let listener =
            Listener::bind(&server::http::Bind::Tcp("127.0.0.1:0".parse().unwrap())).await.unwrap();
        let address = listener.address().strip_prefix("http://").unwrap().to_owned();
        let (orders, received) = mpsc::channel(2);
        let task = tokio::spawn(serve(listener, self.app.clone(), received));
        Live { address, orders, task }
    }
}

pub fn request(method: &str, path: &str) -> axum::http::request::Builder {
    Request::builder().method(method).uri(path).header("host", "localhost")
}

pub fn posted(path: &str, body: impl Into<Body>) -> Request<Body> {
    request("POST", path).header("content-type", "application/json").body(body.into()).unwrap()
}

/// A chat of one question, greedy, thinking off, 24 tokens; with further fields.
pub fn chat(fields: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "What is 37 + 58?"}],
        "temperature": 0, "max_tokens": 24, "reasoning_effort": "none"});
    merge(&mut body, fields);
    body
}

fn merge(body: &mut Value, fields: Value) {
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().unwrap().extend(fields);
}

/// A server on a socket.
pub struct Live {
    pub address: String,
    pub orders: mpsc::Sender<()>,
    pub task: tokio::task::JoinHandle<()>,
}

impl Live {
    pub async fn connect(&self) -> Client {
        Client { stream: TcpStream::connect(&self.address).await.unwrap(), read: Vec::new() }
    }

    pub async fn post(&self, path: &str, body: &Value) -> Client {
        let mut client = self.connect().await;
        client.post(path, body).await;
        client
    }
}

/// A connection.
pub struct Client {
    pub stream: TcpStream,
    pub read: Vec<u8>,
}

impl Client {
    pub async fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    pub async fn post(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.send(&(head + &body)).await;
    }

    /// Reads until `wanted` has been read.
    pub async fn until(&mut self, wanted: &str) -> String {
        let read = async {
            while !String::from_utf8_lossy(&self.read).contains(wanted) {
                let mut bytes = [0; 4096];
                let count = self.stream.read(&mut bytes).await.unwrap();
                assert!(count > 0, "closed before {wanted:?}: {}", String::from_utf8_lossy(&self.read));
                self.read.extend_from_slice(&bytes[..count]);
            }
        };
        tokio::time::timeout(WAIT, read).await.unwrap_or_else(|_| panic!("{wanted:?} did not come"));
        String::from_utf8_lossy(&self.read).into_owned()
    }

    /// Reads until the server closes.
    pub async fn rest(&mut self) -> String {
        let read = async {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = self.stream.read(&mut bytes).await {
                self.read.extend_from_slice(&bytes[..count]);
            }
        };
        tokio::time::timeout(WAIT, read).await.expect("the connection closes");
        String::from_utf8_lossy(&self.read).into_owned()
    }
}

/// Puts the chunks of a chat together as clients do: for each choice its message, finish and
/// log-probabilities.
pub fn joined(events: &[Value]) -> Vec<Value> {
    let mut choices: Vec<Value> = Vec::new();
    for event in events {
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            while choices.len() <= index {
                let index = choices.len();
                choices.push(json!({"index": index, "message": {}, "logprobs": null, "finish_reason": null}));
            }
            join_choice(&mut choices[index], choice);
        }
    }
    choices.iter_mut().for_each(drop_unfinished);
    choices
}

/// Calls that were begun and did not become whole are in no whole reply.
fn drop_unfinished(choice: &mut Value) {
    let message = choice["message"].as_object_mut().unwrap();
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else { return };
    let is_whole = |call: &Value| {
        let arguments = call["function"]["arguments"].as_str().unwrap();
        serde_json::from_str::<Value>(arguments).is_ok()
    };
    calls.retain(is_whole);
    if calls.is_empty() {
        message.shift_remove("tool_calls");
    }
}

fn join_choice(whole: &mut Value, chunk: &Value) {
    assert!(whole["finish_reason"].is_null(), "nothing follows the finish: {chunk}");
    for (name, value) in chunk["delta"].as_object().unwrap() {
        let message = whole["message"].as_object_mut().unwrap();
        match (name.as_str(), value) {
            ("role", role) => drop(message.insert("role".into(), role.clone())),
            ("tool_calls", calls) => join_call(message, &calls[0]),
            (name, Value::String(text)) => {
                let before = message.get(name).and_then(Value::as_str).unwrap_or_default();
                let joined = format!("{before}{text}");
                message.insert(name.into(), joined.into());
            }
            other => panic!("{other:?}"),
        }
    }
    for list in ["content", "reasoning"] {
        let more = chunk["logprobs"][list].as_array().cloned().unwrap_or_default();
        if !more.is_empty() {
            if whole["logprobs"].is_null() {
                whole["logprobs"] = json!({});
            }
            let lists = whole["logprobs"].as_object_mut().unwrap();
            let known = lists.entry(list).or_insert_with(|| json!([])).as_array_mut().unwrap();
            known.extend(more);
        }
    }
    if !chunk["finish_reason"].is_null() {
        assert_eq!(chunk["delta"], json!({}));
        whole["finish_reason"] = chunk["finish_reason"].clone();
        whole["stop_reason"] = chunk["stop_reason"].clone();
    }
}

fn join_call(message: &mut Map<String, Value>, delta: &Value) {
    let calls = message.entry("tool_calls").or_insert_with(|| json!([])).as_array_mut().unwrap();
    let index = delta["index"].as_u64().unwrap() as usize;
    match index == calls.len() {
        true => {
            assert!(delta["id"].as_str().unwrap().starts_with("call_"));
            calls.push(json!({"type": delta["type"], "function": delta["function"]}));
        }
        false => {
            assert_eq!(index + 1, calls.len(), "calls are not interleaved");
            let text = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
            let more = delta["function"]["arguments"].as_str().unwrap();
            calls[index]["function"]["arguments"] = format!("{text}{more}").into();
        }
    }
}

/// A whole reply's choices in the form of [`joined`].
pub fn comparable(reply: &Value) -> Vec<Value> {
    let choices = reply["choices"].as_array().unwrap().iter().map(|choice| {
        let mut choice = choice.clone();
        let message = choice["message"].as_object_mut().unwrap();
        message.remove("refusal");
        if message["content"].is_null() {
            message.insert("content".into(), "".into());
        }
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            call.as_object_mut().unwrap().shift_remove("id");
        }
        if message.get("reasoning_content") == Some(&"".into()) {
            message.remove("reasoning_content");
        }
        let empty = choice["logprobs"]
            .as_object()
            .is_some_and(|lists| lists.values().all(|list| list.as_array().is_some_and(Vec::is_empty)));
        if empty {
            choice["logprobs"] = Value::Null;
        } else if choice["logprobs"]["content"] == json!([]) {
            choice["logprobs"].as_object_mut().unwrap().remove("content");
        }
        choice
    });
    choices.collect()
}
