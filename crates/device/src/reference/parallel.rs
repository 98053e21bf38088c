//! Work spread over threads, results in the order of the items.

use std::sync::{Mutex, PoisonError};

/// Multiplications below which starting threads costs more than it gains.
pub(super) const WORK_MIN: usize = 1 << 19;

/// `work` of every item, taken in turn by up to `threads` threads. Which thread does what changes no result.
pub(super) fn parallel<T: Send, R: Send>(
    threads: usize,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.into_iter().map(work).collect();
    }
    let queue = Mutex::new(items.into_iter().enumerate());
    let take = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        let mut done = Vec::new();
        while let Some((at, item)) = take() {
            done.push((at, work(item)));
        }
        done
    };
    let mut results = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut results = run();
        for other in others {
            match other.join() {
                Ok(done) => results.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|&(at, _)| at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<u64> = (0..500).collect();
        let expected: Vec<u64> = items.iter().map(|x| x * x).collect();
        for threads in [1, 2, 7, 1000] {
            assert_eq!(parallel(threads, items.clone(), |x| x * x), expected);
        }
        assert!(parallel(4, Vec::<u8>::new(), |x| x).is_empty());
    }
}
