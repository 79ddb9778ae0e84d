// SPDX-License-Identifier: Apache-2.0
//! Ends a lack of memory that the kernel does not call one.
//!
//! A machine whose programs take all memory may drop and read again the pages of their code for
//! minutes: there is always a little progress, so the kernel kills nobody. The agent watches the
//! time lost that way (PSI, the kernel's `Documentation/accounting/psi.rst`). If nearly all time
//! is lost for some seconds on end, it has the kernel kill the program that takes the most.

use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PRESSURE: &str = "/proc/pressure/memory";
/// Microseconds in which every program waited, of a window of as many. The kernel takes the last
/// byte for the end of the text.
const TRIGGER: &str = "full 700000 1000000\0";
/// Windows on end. The kernel tells of one at most once.
const WINDOWS: u32 = 4;
/// A longer time between two of them is a pause.
const WINDOW_GAP: Duration = Duration::from_millis(1900);
/// Time for memory to come free before the next kill.
const REST: Duration = Duration::from_secs(3);
const STACK_BYTES: usize = 64 * 1024;

/// Watches for ever, on a thread of its own: the others may wait for memory themselves.
///
/// Errors: the kernel does not measure pressure.
pub fn start() -> io::Result<()> {
    let mut file = File::options().read(true).write(true).open(PRESSURE)?;
    file.write_all(TRIGGER.as_bytes())?;
    // Opened now: later there may be no memory for it, or another /proc.
    let mut killer = File::options().write(true).open("/proc/sysrq-trigger")?;
    std::thread::Builder::new()
        .name("pressure".into())
        .stack_size(STACK_BYTES)
        .spawn(move || watch(&file, &mut killer))
        .map(drop)
}

fn watch(pressure: &File, killer: &mut File) {
    let mut streak = Streak::default();
    loop {
        let mut fds = [PollFd::new(pressure, PollFlags::PRI)];
        match poll(&mut fds, None::<&Timespec>) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) if fds[0].revents().contains(PollFlags::PRI) => {}
            // The kernel has taken the trigger away.
            Ok(_) | Err(_) => return,
        }
        if streak.note(Instant::now()) {
            // As the system request key F: the kernel chooses, and it spares the agent.
            let _ = killer.write_all(b"f");
            std::thread::sleep(REST);
        }
    }
}

/// Windows of pressure that follow each other.
#[derive(Default)]
struct Streak {
    last: Option<Instant>,
    count: u32,
}

impl Streak {
    /// Notes a window; true if there have been enough on end.
    fn note(&mut self, now: Instant) -> bool {
        let goes_on = self
            .last
            .is_some_and(|last| now.duration_since(last) <= WINDOW_GAP);
        self.count = if goes_on { self.count + 1 } else { 1 };
        self.last = Some(now);
        if self.count < WINDOWS {
            return false;
        }
        *self = Self::default();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pressure_without_a_pause_counts() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut streak = Streak::default();
        let noted: Vec<bool> = [0, 1000, 2000, 4500, 5500, 6500, 7500, 8500]
            .into_iter()
            .map(|ms| streak.note(at(ms)))
            .collect();
        let killed = [false, false, false, false, false, false, true, false];
        assert_eq!(noted, killed);
    }
}
