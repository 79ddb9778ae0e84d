// SPDX-License-Identifier: Apache-2.0
//! Collects every dead child: orphans of the sandbox fall to PID 1, which must not let them pile
//! up. A command is the child of its keeper (see `process::spawn`); only when the keeper was
//! killed does the command's exit status arrive here, so the pids of commands are looked for.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

enum Watch {
    Waiting(Option<oneshot::Sender<i32>>),
    Dead(i32),
}

/// Hands out exit statuses of orphaned commands.
#[derive(Default)]
pub struct Reaper {
    watched: Mutex<HashMap<i32, Watch>>,
}

impl Reaper {
    fn watched(&self) -> MutexGuard<'_, HashMap<i32, Watch>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.watched().insert(pid, Watch::Waiting(None));
    }

    /// The raw wait status of a watched pid, now or later.
    pub fn status_of(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        match self.watched().get_mut(&pid) {
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
        self.watched().remove(&pid);
    }

    fn collect(&self) {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result; no pointer is kept.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            let mut watched = self.watched();
            if let Some(watch) = watched.get_mut(&pid) {
                match watch {
                    Watch::Waiting(Some(_)) => {
                        if let Watch::Waiting(Some(sender)) =
                            std::mem::replace(watch, Watch::Dead(status))
                        {
                            let _ = sender.send(status);
                        }
                    }
                    Watch::Waiting(None) => *watch = Watch::Dead(status),
                    Watch::Dead(_) => {}
                }
            }
        }
    }
}
