//! The pool: threads made once that run numbered tasks together with their caller.
//!
//! A decode step has about ten parallel regions per layer, so a region must cost about a microsecond: workers
//! spin for a moment before they sleep, tasks are claimed from one counter, and a worker that wakes too late
//! for a region is not waited for. Which thread runs a task is left open; tasks therefore write to ranges of
//! their own ([`Disjoint`]) and no result may depend on the order.

use std::{
    any::Any,
    cell::UnsafeCell,
    hint::spin_loop,
    marker::PhantomData,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::{self, JoinHandle},
};

/// Rounds a worker spins for the next region before it sleeps: some tens of microseconds.
const SPIN_ROUNDS: u32 = 4000;
/// Rounds the caller spins for the last workers before it offers its core.
const FINISH_ROUNDS: u32 = 2000;

/// Bits of [`Shared::state`]: how many workers are inside the region, whether more may enter, and above them
/// the number of the region.
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const REGION: u64 = 1 << 17;

type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// What the region runs. Written while no worker is inside and the region is closed.
#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
    tasks: usize,
}

struct Shared {
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// Next unclaimed task.
    next: AtomicUsize,
    /// First panic of the region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers asleep or about to be.
    sleepers: AtomicUsize,
    gate: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written by the one caller of `run` while the region is closed and empty, and read by
// workers that entered an open region; the state word orders the two. The pointed-to work is `Sync` and
// outlives the region, because `run` returns only after closing it and seeing it empty.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is the only part that is not `Send` by itself.
unsafe impl Send for Shared {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Claims and runs tasks until none is left.
    fn work(&self, job: Job) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: see `Sync for Shared`: the region is open or we are counted inside it.
            let work = unsafe { &*job.work };
            loop {
                let task = self.next.fetch_add(1, Relaxed);
                if task >= job.tasks {
                    break;
                }
                work(task);
            }
        }));
        if let Err(payload) = outcome {
            self.next.store(job.tasks, Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// Waits for a region after `seen` and returns its number; `None` when the pool ends.
    fn wait(&self, seen: u64) -> Option<u64> {
        let arrived = || {
            let region = self.state.load(SeqCst) / REGION;
            if self.stop.load(SeqCst) { Some(None) } else { (region != seen).then_some(Some(region)) }
        };
        for _ in 0..SPIN_ROUNDS {
            if let Some(answer) = arrived() {
                return answer;
            }
            spin_loop();
        }
        let mut guard = lock(&self.gate);
        self.sleepers.fetch_add(1, SeqCst);
        let answer = loop {
            // Checked after `sleepers` is raised: a caller that opened before this check is seen by it, one
            // that opens after it sees the sleeper and takes the gate.
            if let Some(answer) = arrived() {
                break answer;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, SeqCst);
        answer
    }

    fn worker(&self) {
        let mut seen = 0;
        while let Some(region) = self.wait(seen) {
            seen = region;
            let entered = self.state.fetch_update(AcqRel, Acquire, |state| {
                (state / REGION == region && state & OPEN != 0).then_some(state + 1)
            });
            if entered.is_ok() {
                // SAFETY: counted inside an open region, so the caller neither writes nor leaves.
                if let Some(job) = unsafe { *self.job.get() } {
                    self.work(job);
                }
                self.state.fetch_sub(1, Release);
            }
        }
    }

    fn wake_all(&self) {
        if self.sleepers.load(SeqCst) > 0 {
            drop(lock(&self.gate));
            self.wake.notify_all();
        }
    }
}

/// Threads that run regions of numbered tasks. The caller of [`Self::run`] is one of them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    running: AtomicBool,
}

impl Pool {
    /// A pool of `threads` threads, the caller counted (at least 1). Workers are pinned to cores of their own
    /// where the system allows it and there are enough; the caller's thread is left as it is.
    pub(crate) fn new(threads: usize) -> Self {
        let threads = threads.clamp(1, INSIDE as usize);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            gate: Mutex::new(()),
            wake: Condvar::new(),
        });
        let cores = allowed_cores();
        let spawn = |index: usize| {
            let shared = shared.clone();
            let core = (cores.len() >= threads).then(|| cores[index]);
            let body = move || {
                if let Some(core) = core {
                    pin(core);
                }
                shared.worker();
            };
            // A system that gives fewer threads has a smaller pool: the tasks are all done either way.
            thread::Builder::new().name(format!("cpu-{index}")).spawn(body).ok()
        };
        let workers = (1..threads).map_while(spawn).collect();
        Self { shared, workers, running: AtomicBool::new(false) }
    }

    /// Threads that take part, the caller counted.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work(0)` to `work(tasks - 1)`, each once, and returns when all are done.
    ///
    /// # Panics
    /// With the first panic of a task; tasks not yet begun are then left out. Also if called from inside a
    /// task.
    pub(crate) fn run(&self, tasks: usize, work: &Work<'_>) {
        assert!(!self.running.swap(true, Acquire), "a pool region inside a pool region");
        // SAFETY: only the lifetime changes; the region is closed and empty before `run` returns.
        let work: &Work<'static> = unsafe { std::mem::transmute(work) };
        let job = Job { work, tasks };
        let shared = &*self.shared;
        shared.next.store(0, Relaxed);
        if tasks > 1 && !self.workers.is_empty() {
            // SAFETY: the last region is closed and empty, so no worker looks at the job.
            unsafe { *shared.job.get() = Some(job) };
            let region = shared.state.load(Relaxed) / REGION + 1;
            shared.state.store((region * REGION) | OPEN, SeqCst);
            shared.wake_all();
            shared.work(job);
            shared.state.fetch_and(!OPEN, AcqRel);
            let mut rounds = 0;
            while shared.state.load(Acquire) & INSIDE != 0 {
                rounds += 1;
                if rounds < FINISH_ROUNDS { spin_loop() } else { thread::yield_now() }
            }
        } else {
            shared.work(job);
        }
        let panic = lock(&shared.panic).take();
        self.running.store(false, Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.wake_all();
        for worker in self.workers.drain(..) {
            // A worker's panics were caught and handed to the caller of `run`.
            let _ = worker.join();
        }
    }
}

/// Cores this thread may use; empty where the system does not say.
pub(super) fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a zeroed set is a valid empty set, and the call writes at most its size.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) == 0 {
                return (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect();
            }
        }
    }
    Vec::new()
}

/// Keeps this thread on one core; a refusal costs only speed.
pub(super) fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: `core` came from a set of this size, and the call only reads the set.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

/// A slice that tasks write in ranges of their own.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: ranges are handed out under the contract of `range`, so each element has one writer.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: it is a `&mut [T]` in parts.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for as long as tasks write it.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// No element of it may be in another range that is alive at the same time.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the contract above takes the place of the borrow
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of {}", self.len);
        // SAFETY: inside the slice, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn many_small_regions_see_each_others_writes() {
        let pool = Pool::new(3);
        let mut values = vec![0u32; 8];
        for round in 0..20_000 {
            let parts = Disjoint::new(&mut values);
            // SAFETY: one element per task.
            pool.run(8, &|task| unsafe { parts.range(task..task + 1)[0] += 1 });
            if round % 1000 == 0 {
                assert!(values.iter().all(|&v| v == round + 1));
                // Long enough for some workers to fall asleep.
                for _ in 0..10 * SPIN_ROUNDS {
                    spin_loop();
                }
            }
        }
        assert_eq!(values, [20_000; 8]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for guilty in [0, 5, 99] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(100, &|task| assert!(task != guilty, "task {guilty}"));
            }));
            let payload = outcome.expect_err("the panic is passed on");
            assert_eq!(payload.downcast_ref::<String>(), Some(&format!("task {guilty}")));
            let sum = AtomicUsize::new(0);
            pool.run(100, &|task| {
                sum.fetch_add(task, Relaxed);
            });
            assert_eq!(sum.load(Relaxed), 4950);
        }
    }

    #[test]
    fn a_region_inside_a_region_is_refused() {
        let pool = Pool::new(2);
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(2, &|_| pool.run(1, &|_| {}))));
        assert!(outcome.is_err());
        pool.run(2, &|_| {});
    }

    #[test]
    fn ranges_outside_are_refused() {
        let mut values = [0u8; 4];
        let parts = Disjoint::new(&mut values);
        // SAFETY: only one range is asked for.
        let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { parts.range(2..5).len() }));
        assert!(outcome.is_err());
    }
}
