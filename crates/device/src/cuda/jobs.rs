//! Work on all processors of the host.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use super::driver::Result;

/// Does every job, as many at a time as there are processors: what each gave, in order of the jobs, or the
/// error of one, after which none begins.
pub(super) fn in_parallel<J: Sync, T: Send>(
    jobs: &[J],
    work: impl Fn(&J) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (queue, fault) = (Mutex::new(jobs.iter().enumerate()), Mutex::new(None));
    let done = Mutex::new(Vec::with_capacity(jobs.len()));
    let next = || lock(&queue).next();
    let worker = || {
        while let Some((at, job)) = next() {
            match work(job) {
                Ok(value) => lock(&done).push((at, value)),
                Err(error) => {
                    *lock(&fault) = Some(error);
                    // The others end when the queue is empty.
                    lock(&queue).by_ref().for_each(drop);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()).min(jobs.len()) {
            scope.spawn(worker);
        }
    });
    if let Some(error) = lock(&fault).take() {
        return Err(error);
    }
    let mut done = std::mem::take(&mut *lock(&done));
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, value)| value).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceError;

    #[test]
    fn results_come_in_order_and_errors_end_all() {
        let jobs: Vec<u32> = (0..200).collect();
        assert_eq!(in_parallel(&jobs, |job| Ok(job * 2)).expect("none fails"), {
            jobs.iter().map(|job| job * 2).collect::<Vec<_>>()
        });
        assert_eq!(in_parallel(&[], |job: &u32| Ok(*job)).expect("none fails"), []);
        let failing = |job: &u32| match job {
            7 => Err(DeviceError::Failed { stage: "seven", message: String::new() }),
            _ => Ok(()),
        };
        assert!(in_parallel(&jobs, failing).is_err());
    }
}
