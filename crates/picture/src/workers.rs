//! A few threads that prepare pictures beside everything else, with a queue of named length.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} pictures wait to be decoded already; try again later")]
pub struct Busy {
    /// Pictures that wait.
    pub waiting: usize,
}

struct Queue {
    jobs: VecDeque<Job>,
    ended: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

fn lock(shared: &Shared) -> MutexGuard<'_, Queue> {
    shared.queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads and their queue.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    waiting_max: usize,
}

/// The result of a job, to be waited for. Dropping it lets a job that has not begun be skipped.
pub struct Ticket<T>(mpsc::Receiver<T>);

impl<T> Ticket<T> {
    /// Waits. `None` if the job panicked or the workers ended first.
    pub fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }
}

impl Workers {
    /// `threads` threads (at least one), and room for `waiting_max` jobs that have not begun.
    pub fn new(threads: usize, waiting_max: usize) -> std::io::Result<Self> {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), ended: false });
        let shared = Arc::new(Shared { queue, wake: Condvar::new() });
        let spawn = |at: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("picture-{at}")).spawn(move || {
                give_way();
                work(&shared);
            })
        };
        let threads = (0..threads.max(1)).map(spawn).collect::<std::io::Result<_>>()?;
        Ok(Self { shared, threads, waiting_max })
    }

    /// Queues a job whose result goes to `done`, on a worker's thread.
    pub fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
        done: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Busy> {
        let mut queue = lock(&self.shared);
        if queue.jobs.len() >= self.waiting_max {
            return Err(Busy { waiting: queue.jobs.len() });
        }
        queue.jobs.push_back(Box::new(move || done(job())));
        drop(queue);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Queues a job and gives a ticket for its result.
    pub fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Ticket<T>, Busy> {
        let (send, receive) = mpsc::sync_channel(1);
        self.submit(job, move |result| {
            // Nobody waits any more: the result is dropped.
            let _ = send.send(result);
        })?;
        Ok(Ticket(receive))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared);
        queue.ended = true;
        queue.jobs.clear();
        drop(queue);
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of its jobs.
            let _ = thread.join();
        }
    }
}

/// Priority of a worker where others want the processor: a stream's next token does not wait for a picture.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// Lowers the priority of this thread. Where that is refused it works on as it is.
fn give_way() {
    #[cfg(target_os = "linux")]
    // SAFETY: plain numbers; 0 is the calling thread.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
    }
}

fn work(shared: &Shared) {
    loop {
        let mut queue = lock(shared);
        let job = loop {
            if queue.ended {
                return;
            }
            match queue.jobs.pop_front() {
                Some(job) => break job,
                None => queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(queue);
        // The job's sender is dropped with it, which is how its waiter learns of a panic.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_panics_are_told_and_the_queue_is_bounded() {
        let workers = Workers::new(1, 2).expect("a thread");
        assert_eq!(workers.run(|| 7).expect("room").wait(), Some(7));
        let (go, gate) = mpsc::channel::<()>();
        let (began, begun) = mpsc::channel::<()>();
        let held = workers.run(move || {
            began.send(()).ok();
            gate.recv().ok();
        });
        begun.recv().expect("the job begins");
        let second = workers.run(|| panic!("on purpose"));
        let third = workers.run(|| 3);
        assert_eq!(workers.run(|| 4).err(), Some(Busy { waiting: 2 }));
        go.send(()).expect("the job waits");
        assert!(held.expect("room").wait().is_some());
        let failed: Option<()> = second.expect("room").wait();
        assert_eq!((failed, third.expect("room").wait()), (None, Some(3)));
    }
}
