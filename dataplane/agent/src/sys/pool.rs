// SPDX-License-Identifier: Apache-2.0
//! Worker threads for calls that may block on a disk.
//!
//! tokio's own pool panics when the system refuses its first thread, and a sandbox full of
//! processes refuses threads. Here one thread is made at the start and stays; the others come
//! with need and go with idleness.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::limits::{BLOCKING_IDLE, BLOCKING_STACK_BYTES, BLOCKING_THREADS_MAX};

type Job = Box<dyn FnOnce() + Send>;

struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    jobs: VecDeque::new(),
    threads: 0,
    idle: 0,
});
static WORK: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the thread that stays.
///
/// Errors: what the system says.
pub fn start() -> io::Result<()> {
    state().threads += 1;
    spawn_thread(true)
}

/// Runs `work` on a worker and gives back its result.
///
/// Errors: `Other` if `work` panicked.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    submit(Box::new(move || {
        // If the caller is gone, so is the interest in the result.
        let _ = done.send(work());
    }));
    result
        .await
        .map_err(|_| io::Error::other("a worker failed"))
}

fn submit(job: Job) {
    let mut state = state();
    state.jobs.push_back(job);
    let short = state.idle < state.jobs.len() && state.threads < BLOCKING_THREADS_MAX;
    if short {
        state.threads += 1;
    }
    drop(state);
    WORK.notify_one();
    if short && spawn_thread(false).is_err() {
        // No thread is to be had now: those that are there take the job.
        self::state().threads -= 1;
    }
}

fn spawn_thread(stays: bool) -> io::Result<()> {
    let builder = std::thread::Builder::new()
        .name("worker".into())
        .stack_size(BLOCKING_STACK_BYTES);
    builder.spawn(move || work(stays)).map(drop)
}

fn work(stays: bool) {
    let mut state = state();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            // A panic ends the job, not the thread: the caller sees its channel closed.
            let _ = catch_unwind(AssertUnwindSafe(job));
            state = self::state();
            continue;
        }
        state.idle += 1;
        if stays {
            state = WORK.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        } else {
            let (guard, wait) = WORK
                .wait_timeout(state, BLOCKING_IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if wait.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn results_and_panics_come_back() {
        start().unwrap();
        assert_eq!(run(|| 6 * 7).await.unwrap(), 42);
        assert!(run(|| panic!("on purpose")).await.is_err());
        let mut waits = Vec::new();
        for number in 0..100 {
            waits.push(tokio::spawn(run(move || number)));
        }
        for (number, wait) in waits.into_iter().enumerate() {
            assert_eq!(wait.await.unwrap().unwrap(), number);
        }
        assert!(state().threads <= BLOCKING_THREADS_MAX);
    }
}
