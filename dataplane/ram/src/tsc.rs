// SPDX-License-Identifier: Apache-2.0
//! The rate of the processor's time stamp counter.
//!
//! An emulated guest reads the host's counter. It cannot measure the rate itself: its only reference
//! is an emulated timer, late whenever the host is busy, and then it hangs at boot. So it is told.

use std::time::Duration;

use crate::{Error, Result};

const WINDOW: Duration = Duration::from_millis(100);
const TRIES: usize = 8;

/// Counter and clock (nanoseconds, CLOCK_MONOTONIC_RAW), read as close together as can be had.
#[cfg(target_arch = "x86_64")]
fn reading() -> (u64, u64) {
    let mut best = (0, 0, u64::MAX);
    for _ in 0..TRIES {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: reads a counter.
        let before = unsafe { core::arch::x86_64::_rdtsc() };
        // SAFETY: `time` is valid for writing.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &raw mut time) };
        // SAFETY: reads a counter.
        let after = unsafe { core::arch::x86_64::_rdtsc() };
        let apart = after.wrapping_sub(before);
        if apart < best.2 {
            let ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
            best = (before.wrapping_add(apart / 2), ns, apart);
        }
    }
    (best.0, best.1)
}

/// Kilohertz, measured in a tenth of a second.
#[cfg(target_arch = "x86_64")]
pub fn tsc_khz() -> Result<u64> {
    let (ticks, ns) = reading();
    std::thread::sleep(WINDOW);
    let (ticks_later, ns_later) = reading();
    let ticks = u128::from(ticks_later.wrapping_sub(ticks));
    let ns = u128::from(ns_later.saturating_sub(ns));
    if ticks == 0 || ns == 0 {
        return Err(Error::new("the time stamp counter stands still"));
    }
    Ok((ticks * 1_000_000 / ns) as u64)
}

/// Other processors have none.
#[cfg(not(target_arch = "x86_64"))]
pub fn tsc_khz() -> Result<u64> {
    let _ = (WINDOW, TRIES);
    Err(Error::new(
        "there is no time stamp counter on this processor",
    ))
}
