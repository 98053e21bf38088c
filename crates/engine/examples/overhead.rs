//! Time that the engine itself adds to a step, on the fake model: 8 slots that decode, with and without
//! drafts.
//!
//! The fake's own time is measured by a wrapper round it and taken off.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use engine::fake::{FakeConfig, FakeDrafts, FakeModel};
use engine::{Core, DraftPolicy, Event, Reply, Request, Settings, SystemClock};
use model::{Draft, DraftAsk, Draw, Drawn, Model, ModelError, SlotId, SnapshotId, Spec, Window};

/// A model that adds up the time spent in it.
struct Timed {
    inner: FakeModel,
    spent: Arc<Mutex<Duration>>,
}

impl Timed {
    fn timed<T>(&mut self, call: impl FnOnce(&mut FakeModel) -> T) -> T {
        let before = Instant::now();
        let answer = call(&mut self.inner);
        *self.spent.lock().expect("one thread") += before.elapsed();
        answer
    }
}

impl Model for Timed {
    fn spec(&self) -> &Spec {
        self.inner.spec()
    }
    fn step(&mut self, windows: &[Window]) -> Result<usize, ModelError> {
        self.timed(|model| model.step(windows))
    }
    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Drawn>, ModelError> {
        self.timed(|model| model.draw(draws))
    }
    fn read_logits(&mut self, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        self.timed(|model| model.read_logits(row, out))
    }
    fn keep(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), ModelError> {
        self.timed(|model| model.keep(slot, rows))
    }
    fn draft(&mut self, asks: &[DraftAsk]) -> Result<Vec<Draft>, ModelError> {
        self.timed(|model| model.draft(asks))
    }
    fn save(&mut self, slot: SlotId, into: SnapshotId) -> Result<(), ModelError> {
        self.timed(|model| model.save(slot, into))
    }
    fn load(&mut self, slot: SlotId, from: Option<SnapshotId>) -> Result<(), ModelError> {
        self.timed(|model| model.load(slot, from))
    }
    fn export_snapshot(&mut self, from: SnapshotId) -> Result<Vec<u8>, ModelError> {
        self.timed(|model| model.export_snapshot(from))
    }
    fn import_snapshot(&mut self, into: SnapshotId, bytes: &[u8]) -> Result<(), ModelError> {
        self.timed(|model| model.import_snapshot(into, bytes))
    }
    fn export_page(&mut self, page: u32) -> Result<Vec<u8>, ModelError> {
        self.timed(|model| model.export_page(page))
    }
    fn import_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ModelError> {
        self.timed(|model| model.import_page(page, bytes))
    }
}

fn measure(name: &str, policy: DraftPolicy) {
    let mut config = FakeConfig { drafts: FakeDrafts::Sometimes(80), ..FakeConfig::default() };
    config.spec.slots = 8;
    config.spec.context_max = 4096;
    config.spec.pages = 8 * 64;
    let spent = Arc::new(Mutex::new(Duration::ZERO));
    let model = Timed { inner: FakeModel::new(config), spent: spent.clone() };
    let clock = Arc::new(SystemClock::default());
    let mut core = Core::new(Box::new(model), Settings::new(64, vec![1]), clock).expect("large enough");
    let mut tickets = Vec::new();
    for seed in 0..8u32 {
        let prompt = (0..1000).map(|at| (at * 7 + seed) % 64).collect();
        let mut request = Request::new(prompt, 3000);
        request.sampling.ignore_eos = true;
        request.drafting.policy = policy;
        let (reply, ticket) = Reply::new(Box::new(|_: Event| {}));
        core.submit(core.limits().check(request).expect("fits"), reply);
        tickets.push(ticket);
    }
    while core.status().decoding < 8 {
        core.tick();
    }
    let mut times: Vec<Duration> = Vec::new();
    while core.status().decoding == 8 {
        *spent.lock().expect("one thread") = Duration::ZERO;
        let before = Instant::now();
        core.tick();
        times.push(before.elapsed().saturating_sub(*spent.lock().expect("one thread")));
    }
    times.sort();
    let steps = times.len();
    println!("{name}: median {:?}, 99 % {:?} of {steps} steps", times[steps / 2], times[steps * 99 / 100]);
}

fn main() {
    measure("plain", DraftPolicy::Off);
    measure("3 drafts", DraftPolicy::Fixed(3));
    measure("8 drafts", DraftPolicy::Fixed(8));
    measure("automatic", DraftPolicy::Auto(8));
}
