//! `clary serve`: the server.

mod end;
mod log;
mod options;
mod report;
mod self_test;
mod sizes;
mod watch;

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::time::Instant;

use device::Device;
use engine::{DiskSettings, Engine};
use model::qwen3_5::open;
use sd_notify::NotifyState;
use server::http::{App, Bind, Grammar, Listener, Settings, VERSION};
use server::{Session, TextSide, VisionSettings};
use sha2::{Digest, Sha256};
use text::GrammarCompiler;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tracing::info;

pub(crate) use options::ServeArgs;
#[cfg(test)]
pub(crate) use options::Slots;

use self::end::Orders;
pub(crate) use self::log::LogFormat;
use self::report::{Facts, Report};
use self::self_test::self_test;
use self::sizes::Sizes;
use crate::args::Draft;
use crate::commands::again::kv_name;
use crate::commands::version;
use crate::error::{Exit, Failure, Result};
use crate::load;
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::vision;
use crate::weights::Weights;

/// Threads for connections; the model has its own.
const THREADS: usize = 2;

/// Serves until it is told to end.
pub(crate) fn serve(args: &ServeArgs, output: &Output) -> Result {
    if args.model.machine.device == "reference" {
        let message = "the reference device is outside the contracts and is not served";
        return Err(Failure::usage(message).hint("--device cpu"));
    }
    let _log = log::start(args.work.log_format, output);
    let settings = options::settings(args)?;
    // What can be refused without reading weights comes before anything that others see.
    let ready = Ready::new(args)?;
    let failed = |error: io::Error| Failure::new(Exit::Failure, format!("threads: {error}"));
    let runtime = Builder::new_multi_thread().worker_threads(THREADS).enable_all().build().map_err(failed)?;
    // Where every line is a document, progress has no place among them.
    let mut output = *output;
    output.quiet |= args.work.log_format == LogFormat::Json;
    let result = runtime.block_on(run(ready, settings, output));
    end_now(runtime);
    result
}

/// Waits for no request that is still being prepared: nobody will read its reply.
fn end_now(runtime: Runtime) {
    runtime.shutdown_background();
}

/// A model that is known to fit, and not loaded yet.
struct Ready {
    args: ServeArgs,
    weights: Weights,
    text: TextSide,
    sizes: Sizes,
    device: Box<dyn Device>,
    /// How pictures are read, if they are.
    vision: Option<VisionSettings>,
}

impl Ready {
    fn new(args: &ServeArgs) -> Result<Self> {
        let weights = Weights::open(&args.model.model)?;
        let mut args = args.clone();
        args.model = args.model.on(load::named(&args.model.machine.device, &weights));
        let args = &args;
        let text = TextSide::open(&weights.dir)?;
        let mut device = load::device(&args.model.machine.device, args.threads.threads)?;
        let mut vision = vision::settle(&weights, &args.vision, &mut *device)?;
        if let Some(vision) = &mut vision {
            vision.link_hosts.clone_from(&args.access.image_url_allow);
        }
        let image_tokens = vision.as_ref().map_or(0, |vision| vision.tokens_max);
        let sizes = sizes::settle(&weights, args, image_tokens)?;
        Ok(Self { args: args.clone(), weights, text, sizes, device, vision })
    }

    /// The cache's disk tier, if there is one. Its digest names all that states and their bits depend on.
    fn disk(&self, model_digest: &str) -> Option<DiskSettings> {
        let work = &self.args.work;
        let mtp = self.sizes.model.mtp && self.weights.parts.mtp;
        let kv = kv_name(self.args.model.kv);
        let named = format!("{model_digest}\n{VERSION}\n{}\n{kv}\nmtp {mtp}", version::commit());
        let digest = Sha256::digest(named).into();
        Some(DiskSettings { folder: work.cache_disk.clone()?, bytes_max: work.cache_disk_max, digest })
    }

    /// Loads the model, starts its engine and tries it out.
    fn load(self, app: &App, model_digest: &str, output: &Output) -> Result<Loaded> {
        let mut report = Report::new(&self.args, &self.weights, &self.text, &self.sizes, app.settings());
        let start = Instant::now();
        let mut progress = Progress::new(output, "loading", Unit::Count);
        let mut show = |done: u64, total: u64| {
            progress.set(done, total);
            app.loading(done as f32 / total.max(1) as f32);
        };
        let disk = self.disk(model_digest);
        let qwen = open(self.weights.source(), self.device, self.sizes.model.clone(), &mut show)?;
        drop(progress);
        report.loaded(&qwen, &self.args.model.machine.device);
        let grammar = GrammarCompiler::new(&self.text.tokenizer, &self.text.defaults.stop_ids)?;
        let (vocabulary, ends) = (self.text.tokenizer.vocab_size(), self.text.defaults.stop_ids.clone());
        let work = &self.args.work;
        let engine = Engine::start(
            Box::new(qwen),
            engine::Settings {
                queue_max: work.queue,
                queue_timeout: work.queue_timeout,
                max_stall: work.max_stall,
                cache: self.sizes.cache.clone(),
                disk,
                calibrate: self.args.draft.draft == Draft::Auto,
                ..engine::Settings::new(vocabulary, ends)
            },
        )?;
        report.load = start.elapsed();
        let mut session = Session::new(self.text, engine);
        if let Some(vision) = self.vision {
            session = session.with_vision(vision::start(vision)?);
        }
        report.self_test = Some(self_test(&session, app.settings().drafting)?);
        Ok(Loaded { session, report, grammar: Arc::new(grammar) })
    }
}

/// A model that runs.
struct Loaded {
    session: Session,
    report: Report,
    grammar: Arc<dyn Grammar>,
}

/// Listens, loads, serves, ends. Those who ask while the model is being loaded are told so.
async fn run(ready: Ready, settings: Settings, output: Output) -> Result {
    let facts = Facts::of(&ready.weights, &ready.args.model)?;
    let (mut orders, received) = Orders::watch(settings.drain_timeout)?;
    let listener = bind(&settings.bind).await?;
    let address = listener.address();
    let app = App::new(settings, facts.id.clone());
    let serving = server::http::serve(listener, app.clone(), received);
    let mut serving = std::pin::pin!(serving);
    let exit_on_stall = ready.args.work.exit_on_stall;
    info!(model = facts.id, address, "loading");
    watch::tell(&[NotifyState::Status("loading")]);
    let (sender, loading) = oneshot::channel();
    let (loader, digest) = (app.clone(), facts.digest().to_owned());
    std::thread::spawn(move || {
        // Nobody waits for it where the order to end came first.
        let _ = sender.send(ready.load(&loader, &digest, &output));
    });
    let Loaded { session, report, grammar } = tokio::select! {
        // Told to end before there was anything to wait for.
        () = &mut serving => return Ok(()),
        loaded = loading => match loaded {
            Ok(loaded) => loaded?,
            Err(_) => return Err(Failure::new(Exit::Failure, "a fault while the model was being loaded")),
        },
    };
    let engine = session.engine().clone();
    app.serve_model(session, facts.info(&report), Some(grammar));
    info!(model = facts.id, address, "ready");
    watch::tell(&[NotifyState::Ready, NotifyState::Status("ready")]);
    // A server whose report nobody reads serves all the same.
    let _ = match output.json {
        true => output.out(&format!("{}\n", report.document(&facts, &address))),
        false => output.out(&report.text(&facts, &address)),
    };
    tokio::select! {
        () = &mut serving => {}
        failure = watch::progress(&app, exit_on_stall) => return Err(failure),
    }
    // The engine's last work takes a while where the cache goes to disk.
    let stopping = tokio::task::spawn_blocking(move || engine.stop("the server ends"));
    tokio::select! {
        biased;
        () = orders.second() => Err(Failure::interrupted()),
        _ = stopping => Ok(()),
    }
}

async fn bind(bind: &Bind) -> Result<Listener> {
    let place = match bind {
        Bind::Tcp(address) => address.to_string(),
        Bind::Unix(path) => path.display().to_string(),
    };
    if let Bind::Unix(path) = bind
        && let Ok(found) = path.symlink_metadata()
        && !FileType::is_socket(&found.file_type())
    {
        let message = format!("--unix {place}: there is a file that is no socket");
        return Err(Failure::usage(message).hint("name a path that is free"));
    }
    Listener::bind(bind).await.map_err(|error| {
        let (exit, hint) = match (error.kind(), bind) {
            (io::ErrorKind::AddrInUse, Bind::Tcp(_)) => (
                Exit::Failure,
                "another program listens there: end it, or take --port N (0 for any free one)",
            ),
            (io::ErrorKind::AddrInUse, Bind::Unix(_)) => {
                (Exit::Failure, "another server listens there: end it, or name another path")
            }
            (io::ErrorKind::PermissionDenied, Bind::Tcp(_)) => {
                (Exit::Failure, "ports below 1024 need rights; take a higher one")
            }
            (io::ErrorKind::AddrNotAvailable, _) => {
                (Exit::Usage, "this machine has no such address: --host 127.0.0.1, or 0.0.0.0 for all")
            }
            _ => (Exit::Failure, "check --host, --port or --unix"),
        };
        Failure::new(exit, format!("cannot listen at {place}: {error}")).hint(hint)
    })
}
