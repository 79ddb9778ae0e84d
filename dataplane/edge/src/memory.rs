// SPDX-License-Identifier: Apache-2.0
//! Gives memory back to the system after many connections let go of theirs.
//!
//! glibc keeps freed small blocks. After a burst of some thousand connections that would hold
//! hundreds of MiB for ever, although the connections are at rest and need next to nothing.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits::{TRIM_AFTER_FREED, TRIM_INTERVAL};

static FREED: AtomicUsize = AtomicUsize::new(0);

/// Note that a connection gave up its buffers, or ended.
pub fn note_freed() {
    FREED.fetch_add(1, Ordering::Relaxed);
}

/// Trim now and then, for ever, when it is worth it.
pub async fn trim() {
    let mut tick = tokio::time::interval(TRIM_INTERVAL);
    loop {
        tick.tick().await;
        if FREED.load(Ordering::Relaxed) < TRIM_AFTER_FREED {
            continue;
        }
        FREED.store(0, Ordering::Relaxed);
        // Walking the heap takes milliseconds: not on a thread that carries traffic. It fails only
        // at the end of the process.
        drop(tokio::task::spawn_blocking(release).await);
    }
}

fn release() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) may be called at any time from any thread; it only returns free pages.
    unsafe {
        libc::malloc_trim(0);
    }
}
