// SPDX-License-Identifier: Apache-2.0
//! Reading `/proc` (proc(5)) through a directory descriptor taken at the start.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{Dir, Mode, OFlags, openat};

/// What `/proc/<pid>/stat` says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcStat {
    /// Process id.
    pub pid: i32,
    /// State letter; `Z` and `X` are dead.
    pub state: u8,
    /// Parent.
    pub ppid: i32,
    /// Session.
    pub session: i32,
    /// Start time in clock ticks since boot: with the pid it names one process for good.
    pub start_ticks: u64,
}

impl ProcStat {
    /// Whether the process is only a record that waits for its parent.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }

    /// Parses a line of `stat`. The name in parentheses may hold anything, so the last `)` counts.
    fn parse(line: &str) -> Option<Self> {
        let pid = line.split(' ').next()?.parse().ok()?;
        let rest = &line[line.rfind(')')? + 1..];
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            pid,
            state: *fields.first()?.as_bytes().first()?,
            ppid: fields.get(1)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            start_ticks: fields.get(19)?.parse().ok()?,
        })
    }
}

/// The facts of one process; `None` if it is gone.
pub fn stat(proc_dir: BorrowedFd<'_>, pid: i32) -> Option<ProcStat> {
    ProcStat::parse(&read_at(proc_dir, &format!("{pid}/stat")).ok()?)
}

/// The facts of all processes that are visible.
///
/// Errors: what reading the directory says.
pub fn all(proc_dir: BorrowedFd<'_>) -> io::Result<HashMap<i32, ProcStat>> {
    let mut found = HashMap::new();
    for entry in Dir::read_from(proc_dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Ok(pid) = name.parse()
            && let Some(stat) = stat(proc_dir, pid)
        {
            found.insert(pid, stat);
        }
    }
    Ok(found)
}

/// Reads a small file below the directory.
///
/// Errors: what the system says.
pub fn read_at(dir: BorrowedFd<'_>, path: &str) -> io::Result<String> {
    let fd = openat(
        dir.as_fd(),
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut text = Vec::with_capacity(1024);
    std::fs::File::from(fd).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_stat_line_with_a_spiteful_name() {
        let line = "42 (a) R (b) S 7 42 40 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9876 0 0";
        let stat = ProcStat::parse(line).unwrap();
        assert_eq!(
            (stat.pid, stat.state, stat.ppid, stat.session),
            (42, b'S', 7, 40)
        );
        assert_eq!(stat.start_ticks, 9876);
        assert!(ProcStat::parse("").is_none());
        assert!(ProcStat::parse("1 (x) R").is_none());
    }

    #[test]
    fn finds_this_process() {
        let dir = std::fs::File::open("/proc").unwrap();
        let own = std::process::id() as i32;
        assert_eq!(all(dir.as_fd()).unwrap()[&own].pid, own);
        assert!(stat(dir.as_fd(), i32::MAX).is_none());
    }
}
