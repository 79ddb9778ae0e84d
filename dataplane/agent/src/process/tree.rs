// SPDX-License-Identifier: Apache-2.0
//! Ending a command with everything it started.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::live::Process;
use crate::agent::Agent;
use crate::limits::KILL_ROUNDS_MAX;
use crate::sys::proc::{self, ProcStat};

/// Between rounds the killed ones need a moment to go.
const ROUND_DELAY: Duration = Duration::from_millis(5);

/// Kills a command's whole tree.
///
/// All are stopped first: a stopped process starts no other, so when a look at `/proc` shows no
/// new one, the set is closed and can be killed. Runs on the main thread and starts nothing, for
/// a sandbox at its limit of processes is just the one that needs it.
pub async fn kill(agent: &Arc<Agent>, process: &Process) {
    let pid = i32::try_from(process.pid).unwrap_or(i32::MAX);
    let mut members: HashMap<i32, ProcStat> = HashMap::new();
    for _ in 0..KILL_ROUNDS_MAX {
        let all = proc::all(agent.proc_dir.as_fd()).unwrap_or_default();
        // A member may have become a child of PID 1 since it was found.
        members.retain(|pid, old| is_same(all.get(pid), old));
        let keeper = process
            .keeper
            .filter(|keeper| is_same(all.get(&keeper.pid), keeper));
        let keeper = keeper.map(|keeper| keeper.pid);
        let roots = members.keys().copied().chain(keeper).chain([pid]).collect();
        let mut fresh = Vec::new();
        for found in descendants(&all, &roots, pid) {
            if Some(found.pid) != keeper && members.insert(found.pid, found).is_none() {
                fresh.push(found);
            }
        }
        if !fresh.is_empty() {
            for member in fresh {
                send(agent, &member, libc::SIGSTOP);
            }
            continue;
        }
        if members.is_empty() {
            break;
        }
        for member in members.values() {
            send(agent, member, libc::SIGKILL);
        }
        tokio::time::sleep(ROUND_DELAY).await;
    }
    if members.is_empty() && !process.has_ended() {
        // Without a view of /proc the program itself is still known.
        let _ = process.signal(libc::SIGKILL);
    }
}

/// Kills a keeper whose program did not start, and the program if it hangs on its way.
pub fn abandon(agent: &Agent, keeper: Option<ProcStat>) {
    let Some(keeper) = keeper else { return };
    let all = proc::all(agent.proc_dir.as_fd()).unwrap_or_default();
    for child in all.values().filter(|stat| stat.ppid == keeper.pid) {
        send(agent, child, libc::SIGKILL);
    }
    send(agent, &keeper, libc::SIGKILL);
}

/// Whether a record is of the same, living process.
fn is_same(now: Option<&ProcStat>, before: &ProcStat) -> bool {
    now.is_some_and(|now| now.start_ticks == before.start_ticks && !now.is_dead())
}

/// The living processes below the roots, the roots included, and those of the command's session.
fn descendants(all: &HashMap<i32, ProcStat>, roots: &HashSet<i32>, session: i32) -> Vec<ProcStat> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for stat in all.values() {
        children.entry(stat.ppid).or_default().push(stat.pid);
    }
    let mut open: Vec<i32> = roots.iter().copied().collect();
    open.extend(
        all.values()
            .filter(|stat| stat.session == session)
            .map(|stat| stat.pid),
    );
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    while let Some(pid) = open.pop() {
        if !seen.insert(pid) {
            continue;
        }
        if let Some(stat) = all.get(&pid).filter(|stat| !stat.is_dead()) {
            found.push(*stat);
        }
        open.extend(children.get(&pid).into_iter().flatten());
    }
    found
}

/// Signals a process after making sure that the pid still means it.
fn send(agent: &Agent, target: &ProcStat, signal: i32) {
    let now = proc::stat(agent.proc_dir.as_fd(), target.pid);
    if target.pid > 1 && is_same(now.as_ref(), target) {
        // SAFETY: kill(2) with plain numbers.
        unsafe { libc::kill(target.pid, signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(pid: i32, ppid: i32, session: i32, state: u8) -> (i32, ProcStat) {
        (
            pid,
            ProcStat {
                pid,
                state,
                ppid,
                session,
                start_ticks: 1,
            },
        )
    }

    #[test]
    fn finds_children_orphans_and_the_session_but_no_dead_ones() {
        let all = HashMap::from([
            stat(1, 0, 1, b'S'),
            stat(10, 1, 1, b'S'),   // keeper
            stat(11, 10, 11, b'S'), // program
            stat(12, 11, 11, b'Z'), // dead child
            stat(13, 12, 13, b'R'), // child of the dead one
            stat(14, 10, 14, b'S'), // orphan with its own session, below the keeper
            stat(15, 1, 11, b'S'),  // same session, other parent
            stat(20, 1, 20, b'S'),  // somebody else
        ]);
        let mut found: Vec<i32> = descendants(&all, &HashSet::from([10, 11]), 11)
            .iter()
            .map(|s| s.pid)
            .collect();
        found.sort_unstable();
        assert_eq!(found, vec![10, 11, 13, 14, 15]);
    }
}
