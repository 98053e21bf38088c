//! The engine's thread and the handle that requests go through.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use model::Model;

use crate::clock::{Clock, SystemClock};
use crate::core::{Core, Settings, StartError, Status};
use crate::event::{CacheReport, Reply, ReplyError, Sink, Ticket};
use crate::request::{Checked, Limits, Refusal, Request};

/// Starts engines.
pub struct Engine;

enum Command {
    Submit(Box<Checked>, Reply),
    LookUp(Box<Checked>, Box<dyn FnOnce(CacheReport) + Send>),
    Stop(String),
}

/// What handles and the thread share.
struct Shared {
    limits: Limits,
    queue_max: usize,
    /// Requests that were taken and have no slot yet.
    queued: AtomicUsize,
    /// Nanoseconds of the clock at which the engine last got something to do. A rest is no stall.
    woken: AtomicU64,
    /// Questions to the prefix cache that have no answer yet.
    looked_up: AtomicUsize,
    status: Mutex<Status>,
    /// Why the engine takes nothing any more.
    stopped: Mutex<Option<String>>,
    clock: Arc<dyn Clock>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The way to a running engine. Copies lead to the same one; when the last is dropped the engine finishes
/// what runs and ends.
#[derive(Clone)]
pub struct Handle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

impl Engine {
    /// Gives the model to a thread of its own. Returns once the engine is ready for requests.
    pub fn start(model: Box<dyn Model>, settings: Settings) -> Result<Handle, StartError> {
        Self::start_with(model, settings, Arc::new(SystemClock::default()))
    }

    /// The same with a clock of the caller's.
    pub fn start_with(
        model: Box<dyn Model>,
        settings: Settings,
        clock: Arc<dyn Clock>,
    ) -> Result<Handle, StartError> {
        let (commands, received) = channel();
        let (ready, started) = channel();
        let shared = Arc::new(Shared {
            limits: Limits::new(model.spec(), settings.vocabulary).with_images(model.image_spec()),
            queue_max: settings.queue_max,
            queued: AtomicUsize::new(0),
            woken: AtomicU64::new(0),
            looked_up: AtomicUsize::new(0),
            status: Mutex::default(),
            stopped: Mutex::default(),
            clock: clock.clone(),
            thread: Mutex::default(),
        });
        let mine = shared.clone();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            match Core::new(model, settings, clock) {
                Ok(core) => {
                    mine.publish(core.status());
                    // The caller waits for this; if it is gone, so are its commands, and the loop ends at
                    // once.
                    let _ = ready.send(Ok(()));
                    serve(core, &received, &mine);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        });
        let thread = thread.map_err(StartError::Thread)?;
        *lock(&shared.thread) = Some(thread);
        match started.recv() {
            Ok(Ok(())) => Ok(Handle { commands, shared }),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                Err(StartError::Thread(std::io::Error::other("it ended while the model was tried out")))
            }
        }
    }
}

impl Handle {
    /// Takes a request, or says why not. Events go to `sink`, on the engine thread; dropping the ticket
    /// cancels.
    pub fn submit(&self, request: Request, sink: Box<dyn Sink>) -> Result<Ticket, Refusal> {
        let checked = self.shared.limits.check(request)?;
        // Held until the request is on its way: the thread answers whatever was sent before it stopped.
        let stopped = lock(&self.shared.stopped);
        if let Some(reason) = &*stopped {
            return Err(Refusal::Stopped { reason: reason.clone() });
        }
        if !self.shared.busy() {
            let now = self.shared.clock.now().as_nanos() as u64;
            self.shared.woken.store(now, Ordering::Release);
        }
        let limit = self.shared.queue_max;
        let count = |queued: usize| (queued < limit).then_some(queued + 1);
        let counted = self.shared.queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, count);
        if counted.is_err() {
            return Err(Refusal::QueueFull { limit });
        }
        let (reply, ticket) = Reply::new(sink);
        match self.commands.send(Command::Submit(Box::new(checked), reply)) {
            Ok(()) => Ok(ticket),
            Err(_) => Err(Refusal::Stopped { reason: "its thread is gone".into() }),
        }
    }

    /// Asks what the prefix cache would give this request if it ran now; nothing runs and nothing is marked
    /// as used. `answer` is called on the engine thread between two steps, or never if the engine stops
    /// before.
    pub fn look_up(
        &self,
        request: Request,
        answer: impl FnOnce(CacheReport) + Send + 'static,
    ) -> Result<(), Refusal> {
        let checked = self.shared.limits.check(request)?;
        let limit = self.shared.queue_max;
        let count = |asked: usize| (asked < limit).then_some(asked + 1);
        if self.shared.looked_up.fetch_update(Ordering::AcqRel, Ordering::Acquire, count).is_err() {
            return Err(Refusal::QueueFull { limit });
        }
        let gone = |_| Refusal::Stopped { reason: "its thread is gone".into() };
        self.commands.send(Command::LookUp(Box::new(checked), Box::new(answer))).map_err(gone)
    }

    /// What requests must fit.
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// What the engine was doing after its last step.
    pub fn status(&self) -> Status {
        lock(&self.shared.status).clone()
    }

    /// Time since the last step ended, or since the work came where it found the engine at rest; `None` if
    /// nothing runs or waits. A sign of life for health checks.
    pub fn step_age(&self) -> Option<Duration> {
        let woken = Duration::from_nanos(self.shared.woken.load(Ordering::Acquire));
        let since = self.status().last_step.max(woken);
        self.shared.busy().then(|| self.shared.clock.now().saturating_sub(since))
    }

    /// Why the engine stopped; `None` while it lives.
    pub fn stopped(&self) -> Option<String> {
        lock(&self.shared.stopped).clone()
    }

    /// Ends what runs and waits with `reason`, writes the disk tier, and waits for the thread.
    pub fn stop(&self, reason: &str) {
        // An engine that is gone already needs no order.
        let _ = self.commands.send(Command::Stop(reason.to_owned()));
        let thread = lock(&self.shared.thread).take();
        if let Some(thread) = thread {
            // The loop catches panics itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Whether anything runs or waits.
    fn busy(&self) -> bool {
        let status = lock(&self.status);
        status.prefilling + status.decoding + self.queued.load(Ordering::Acquire) > 0
    }

    fn publish(&self, status: Status) {
        *lock(&self.status) = status;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread's whole life.
fn serve(mut core: Core, commands: &Receiver<Command>, shared: &Shared) {
    let ended = catch_unwind(AssertUnwindSafe(|| turn(&mut core, commands, shared)));
    let (reason, whole) = match ended {
        Ok(reason) => (reason, true),
        Err(panic) => (format!("a fault on the engine thread: {}", message(&*panic)), false),
    };
    *lock(&shared.stopped) = Some(reason.clone());
    let error = ReplyError::Stopped { reason };
    let last = AssertUnwindSafe(|| {
        while let Ok(command) = commands.try_recv() {
            if let Command::Submit(checked, reply) = command {
                core.submit(*checked, reply);
            }
        }
        core.fail_all(&error);
        if whole {
            core.persist();
        }
        shared.publish(core.status());
    });
    // After a panic the core may be in any state; what can still be told has been told.
    let _ = catch_unwind(last);
}

/// Takes commands and ticks until told to stop or nobody can send any more.
fn turn(core: &mut Core, commands: &Receiver<Command>, shared: &Shared) -> String {
    core.tick_on();
    let mut waiting = 0;
    let mut busy = false;
    let mut news = false;
    let tell = |core: &Core, waiting: &mut usize| {
        let still = core.waiting();
        shared.queued.fetch_sub(*waiting - still, Ordering::AcqRel);
        *waiting = still;
        shared.publish(core.status());
    };
    loop {
        let command = match busy {
            true => commands.try_recv(),
            false => commands.recv().map_err(|_| TryRecvError::Disconnected),
        };
        match command {
            Ok(Command::Submit(checked, reply)) => {
                core.submit(*checked, reply);
                waiting += 1;
                busy = true;
                news = true;
                continue;
            }
            Ok(Command::LookUp(checked, answer)) => {
                shared.looked_up.fetch_sub(1, Ordering::AcqRel);
                answer(core.look_up_now(&checked));
                continue;
            }
            Ok(Command::Stop(reason)) => return reason,
            Err(TryRecvError::Disconnected) if !busy => return "nobody uses it".into(),
            Err(_) => {}
        }
        if std::mem::take(&mut news) {
            core.welcome();
            tell(core, &mut waiting);
        }
        busy = core.tick();
        tell(core, &mut waiting);
        if core.device_lost() {
            return "the device is lost: step after step failed".into();
        }
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}
