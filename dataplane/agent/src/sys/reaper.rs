// SPDX-License-Identifier: Apache-2.0
//! Collects every dead child: orphans of the sandbox fall to PID 1, which must not let them pile
//! up. A command is the child of its keeper (see `process::spawn`); only when the keeper was
//! killed does the command's exit status arrive here, so the pids of commands are looked for.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::limits::{UNCLAIMED_EXIT_AGE, UNCLAIMED_EXITS_MAX};

enum Watch {
    Waiting(Option<oneshot::Sender<i32>>),
    Dead(i32),
}

struct Unclaimed {
    pid: i32,
    status: i32,
    since: Instant,
}

#[derive(Default)]
struct State {
    watched: HashMap<i32, Watch>,
    /// The latest dead that nobody looks for, or not yet.
    unclaimed: VecDeque<Unclaimed>,
}

/// Hands out exit statuses of orphaned commands.
#[derive(Default)]
pub struct Reaper {
    state: Mutex<State>,
}

impl Reaper {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts collecting. Must run inside the runtime.
    ///
    /// Errors: what installing the signal handler says.
    pub fn start() -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self::default());
        let mut deaths = signal(SignalKind::child())?;
        let collector = Arc::clone(&reaper);
        tokio::spawn(async move {
            loop {
                collector.collect();
                if deaths.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(reaper)
    }

    /// Keeps the status of `pid` should it come this way, until `forget`.
    pub fn watch(&self, pid: i32) {
        let mut state = self.state();
        let fresh = |dead: &&Unclaimed| dead.since.elapsed() < UNCLAIMED_EXIT_AGE;
        let dead = state
            .unclaimed
            .iter()
            .rev()
            .take_while(fresh)
            .find(|dead| dead.pid == pid);
        let watch = dead.map_or(Watch::Waiting(None), |dead| Watch::Dead(dead.status));
        state.watched.insert(pid, watch);
    }

    /// The raw wait status of a watched pid, now or later.
    pub fn status_of(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        match self.state().watched.get_mut(&pid) {
            Some(Watch::Dead(status)) => {
                let _ = sender.send(*status);
            }
            Some(Watch::Waiting(slot)) => *slot = Some(sender),
            None => {}
        }
        receiver
    }

    /// No longer looks for `pid`.
    pub fn forget(&self, pid: i32) {
        self.state().watched.remove(&pid);
    }

    fn collect(&self) {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result; no pointer is kept.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            self.bury(pid, status);
        }
    }

    fn bury(&self, pid: i32, status: i32) {
        let mut state = self.state();
        match state.watched.insert(pid, Watch::Dead(status)) {
            Some(Watch::Waiting(Some(sender))) => {
                let _ = sender.send(status);
            }
            Some(_) => {}
            None => {
                state.watched.remove(&pid);
                let old = |dead: &Unclaimed| dead.since.elapsed() >= UNCLAIMED_EXIT_AGE;
                while state.unclaimed.len() >= UNCLAIMED_EXITS_MAX
                    || state.unclaimed.front().is_some_and(old)
                {
                    state.unclaimed.pop_front();
                }
                let since = Instant::now();
                state.unclaimed.push_back(Unclaimed { pid, status, since });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_found_whenever_it_is_asked_for() {
        let reaper = Reaper::default();
        // Dead before anybody looked for it.
        reaper.bury(5, 1);
        reaper.watch(5);
        assert_eq!(reaper.status_of(5).blocking_recv(), Ok(1));
        // Looked for, then dead, then asked for.
        reaper.watch(6);
        reaper.bury(6, 2);
        assert_eq!(reaper.status_of(6).blocking_recv(), Ok(2));
        // Asked for, then dead.
        reaper.watch(7);
        let status = reaper.status_of(7);
        reaper.bury(7, 3);
        assert_eq!(status.blocking_recv(), Ok(3));
        reaper.forget(7);
        assert!(reaper.status_of(7).blocking_recv().is_err());
        for pid in 100..100 + 2 * UNCLAIMED_EXITS_MAX as i32 {
            reaper.bury(pid, 0);
        }
        assert_eq!(reaper.state().unclaimed.len(), UNCLAIMED_EXITS_MAX);
    }
}
