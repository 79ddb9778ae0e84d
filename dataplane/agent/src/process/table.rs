// SPDX-License-Identifier: Apache-2.0
//! All programs that run, and for a while those that ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::exit::Exit;
use super::live::Process;
use super::messages::ProcessName;
use crate::connect::RpcError;
use crate::limits::{EXIT_RETENTION, PROCESSES_MAX};
use crate::sys::reaper::Reaper;

/// A program that ended a short while ago.
#[derive(Clone)]
pub struct Ended {
    /// Its process id.
    pub pid: u32,
    tag: Option<String>,
    /// How it ended.
    pub exit: Exit,
    /// Tells one program from a later one with the same pid.
    serial: u64,
}

#[derive(Default)]
struct Entries {
    live: HashMap<u32, Arc<Process>>,
    starting: usize,
    ended: HashMap<u32, Ended>,
    serial: u64,
}

/// The table of programs.
pub struct ProcessTable {
    entries: Mutex<Entries>,
    /// Where statuses of orphaned programs come from.
    pub reaper: Arc<Reaper>,
}

/// A place for a program that is being started.
pub struct Place(Arc<ProcessTable>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.entries().starting -= 1;
    }
}

impl ProcessTable {
    /// An empty table.
    pub fn new(reaper: Arc<Reaper>) -> Self {
        Self {
            entries: Mutex::default(),
            reaper,
        }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a new program.
    ///
    /// Errors: `resource_exhausted` if all are taken.
    pub fn reserve(self: &Arc<Self>) -> Result<Place, RpcError> {
        let mut entries = self.entries();
        if entries.live.len() + entries.starting >= PROCESSES_MAX {
            return Err(RpcError::exhausted(format!(
                "{PROCESSES_MAX} commands run in this sandbox, end some"
            )));
        }
        entries.starting += 1;
        Ok(Place(Arc::clone(self)))
    }

    /// Enters a started program. An ended one with the same pid or tag is forgotten, so that
    /// nobody takes its exit status for that of the new one.
    pub fn enter(&self, process: &Arc<Process>) {
        let mut entries = self.entries();
        entries.ended.retain(|pid, ended| {
            *pid != process.pid && (ended.tag.is_none() || ended.tag != process.tag)
        });
        entries.live.insert(process.pid, Arc::clone(process));
    }

    /// Moves a program to those that ended, and forgets it after a while. Must run inside the
    /// runtime.
    pub fn finish(self: &Arc<Self>, process: &Arc<Process>, exit: Exit) {
        let mut entries = self.entries();
        entries.serial += 1;
        let (pid, serial) = (process.pid, entries.serial);
        if entries
            .live
            .get(&pid)
            .is_some_and(|live| Arc::ptr_eq(live, process))
        {
            entries.live.remove(&pid);
        }
        entries.ended.insert(
            pid,
            Ended {
                pid,
                tag: process.tag.clone(),
                exit,
                serial,
            },
        );
        drop(entries);
        let table = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(EXIT_RETENTION).await;
            let mut entries = table.entries();
            if entries
                .ended
                .get(&pid)
                .is_some_and(|ended| ended.serial == serial)
            {
                entries.ended.remove(&pid);
            }
        });
    }

    /// The running program of a name.
    ///
    /// Errors: `not_found`.
    pub fn find(&self, name: &ProcessName) -> Result<Arc<Process>, RpcError> {
        let entries = self.entries();
        let found = match name {
            ProcessName::Pid(pid) => entries.live.get(pid),
            ProcessName::Tag(tag) => entries
                .live
                .values()
                .find(|process| process.tag.as_ref() == Some(tag)),
        };
        found.cloned().ok_or_else(|| {
            RpcError::not_found(match name {
                ProcessName::Pid(pid) => format!("process with pid {pid} not found"),
                ProcessName::Tag(tag) => format!("process with tag {tag} not found"),
            })
        })
    }

    /// The lately ended program of a name.
    pub fn find_ended(&self, name: &ProcessName) -> Option<Ended> {
        let entries = self.entries();
        match name {
            ProcessName::Pid(pid) => entries.ended.get(pid).cloned(),
            ProcessName::Tag(tag) => {
                let named = |ended: &&Ended| ended.tag.as_ref() == Some(tag);
                entries
                    .ended
                    .values()
                    .filter(named)
                    .max_by_key(|ended| ended.serial)
                    .cloned()
            }
        }
    }

    /// All running programs, by pid.
    pub fn list(&self) -> Vec<Arc<Process>> {
        let mut all: Vec<_> = self.entries().live.values().cloned().collect();
        all.sort_by_key(|process| process.pid);
        all
    }

    /// How many programs run.
    pub fn live_count(&self) -> usize {
        self.entries().live.len()
    }
}
