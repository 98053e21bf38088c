//! `clary soak`: a long mixed load on a server over HTTP, with clients that leave.

mod ask;
mod child;
mod load;
mod tally;

use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use clap::Args;

use self::ask::Asks;
use self::child::Server;
use self::load::Load;
use crate::args::up_to;
use crate::client::Client;
use crate::error::{Exit, Failure, Result};
use crate::interrupt::Interrupt;
use crate::numbers::Numbers;
use crate::output::Output;

/// Most streams.
const STREAMS_MAX: usize = 256;
/// Time between looks at the server's memory, and at the clock.
const SAMPLE: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(100);
/// Time between lines of progress.
const LINE: Duration = Duration::from_secs(10);
/// Time in which slots must be idle after the last request.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// `soak`.
#[derive(Clone, Debug, Args)]
pub(crate) struct SoakArgs {
    /// MODEL to serve for the soak, on a free port [default: the server at --url]
    #[arg(required_unless_present = "url", conflicts_with = "url")]
    pub(crate) model: Option<String>,
    /// A running server; CLARY_API_KEY is its key
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Requests open at a time; a MODEL is served with three slots for four streams, so that some wait
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = up_to::<STREAMS_MAX>)]
    pub(crate) streams: usize,
    /// How long new requests are sent
    #[arg(long, value_name = "N", default_value_t = 1.0, value_parser = minutes)]
    pub(crate) minutes: f64,
    /// Key of every choice
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) seed: u64,
    /// With a MODEL: its device, as in `serve`
    #[arg(long, value_name = "NAME", requires = "model")]
    pub(crate) device: Option<String>,
    /// With a MODEL: tokens of a slot, as in `serve`
    #[arg(long, value_name = "N|auto", requires = "model")]
    pub(crate) ctx: Option<String>,
    /// With a MODEL: drafts, as in `serve`
    #[arg(long, value_name = "auto|off|K", requires = "model")]
    pub(crate) draft: Option<String>,
}

impl SoakArgs {
    /// Slots of a server of its own.
    fn slots(&self) -> usize {
        (self.streams - self.streams / 4).min(64)
    }
}

fn minutes(text: &str) -> std::result::Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.01..=10_000.0).contains(value));
    value.ok_or("a number from 0.01 to 10000".into())
}

/// Puts the load on a server, prints a table; any failure is a failure of the command.
pub(crate) fn soak(args: &SoakArgs, output: &Output) -> Result {
    let interrupt = Interrupt::install()?;
    let server = args.model.as_ref().map(|model| Server::start(model, args)).transpose()?;
    let url = server.as_ref().map(|server| server.url.clone()).or_else(|| args.url.clone());
    let client = Client::new(&url.unwrap_or_default())?;
    let models = client.get("/v1/models")?.ok("/v1/models")?.json();
    let model = models["data"][0]["id"].as_str().unwrap_or("model");
    let context = models["data"][0]["max_model_len"].as_u64().unwrap_or(4096) as usize;
    let can = models["data"][0]["capabilities"].as_array();
    let asks = Asks::new(args.seed, model, context, can.is_some_and(|can| can.contains(&"vision".into())));
    let pictures = if asks.has_pictures() { "with pictures" } else { "without pictures" };
    output.note(&format!(
        "{model} at {}, {} streams, {} minutes, seed {}, {pictures}: known replies alone first",
        client.base, args.streams, args.minutes, args.seed
    ))?;
    let load = Load::prepare(client.clone(), asks, args.seed)?;
    let was_interrupted = run(&load, &client, args, &interrupt, output)?;
    let mut tally = load.tally().clone();
    tally.busy = Some(busy(&client)?);
    if let Some(Err(problem)) = server.map(Server::end) {
        tally.fail(problem);
    }
    tally.judge();
    match output.json {
        true => output.document(&tally.document())?,
        false => output.out(&tally.table())?,
    }
    match tally.failures {
        _ if was_interrupted => Err(Failure::interrupted()),
        0 => Ok(()),
        count => Err(Failure::new(Exit::Failure, format!("the soak has {count} failures"))
            .hint("the same --seed and --streams ask the same again; the server's log has the request ids")),
    }
}

/// Lets the streams run, with a line of progress now and then. True if Ctrl-C ended it.
fn run(
    load: &Load,
    client: &Client,
    args: &SoakArgs,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<bool> {
    let duration = Duration::from_secs_f64(args.minutes * 60.0);
    interrupt.watch(true);
    let start = Instant::now();
    let was_interrupted = scope(|scope| {
        for number in 0..args.streams {
            scope.spawn(move || load.stream(number as u64));
        }
        let (mut sampled, mut told) = (None, Duration::ZERO);
        let stopped = loop {
            let elapsed = start.elapsed();
            load.tally().elapsed = elapsed;
            if sampled.is_none_or(|at| elapsed >= at + SAMPLE) {
                sampled = Some(elapsed);
                sample(load, client, elapsed);
            }
            if elapsed >= told + LINE {
                told = elapsed;
                // A soak whose progress nobody reads goes on all the same.
                let line = load.tally().line();
                let _ = output.note(&line);
            }
            if elapsed >= duration {
                break false;
            }
            if interrupt.take() {
                break true;
            }
            sleep(TICK.min(duration - elapsed));
        };
        load.end();
        stopped
    });
    load.tally().elapsed = start.elapsed();
    sample(load, client, start.elapsed());
    interrupt.watch(false);
    Ok(was_interrupted)
}

/// Looks at the server's memory, less the picture features it keeps: they fill up to a limit of their own,
/// which says nothing about leaks. A server that does not answer here fails its requests, too.
fn sample(load: &Load, client: &Client, elapsed: Duration) {
    let numbers = client.get("/metrics").map(|answer| Numbers::read(&answer.body));
    let own = |numbers: Numbers| {
        let features = numbers.sum("clary_cache_feature_bytes").unwrap_or(0.0);
        Some(numbers.sum("process_resident_memory_bytes")? - features)
    };
    if let Some(bytes) = numbers.ok().and_then(own) {
        load.tally().memory.push((elapsed, bytes as u64));
    }
}

/// Choices in slots and in the queue, once there are none or the time for that is over.
fn busy(client: &Client) -> Result<u64> {
    let end = Instant::now() + IDLE_TIME;
    loop {
        let ready = client.get("/ready")?.json();
        let count = |name: &str| ready[name].as_u64().unwrap_or(0);
        let busy = count("running") + count("queued");
        if busy == 0 || Instant::now() > end {
            return Ok(busy);
        }
        sleep(TICK);
    }
}
