// SPDX-License-Identifier: Apache-2.0
//! The order in which chunks were first read after a layer was first used.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::{Error, Result, lock};

/// A trace has at most this many chunks.
pub const CHUNKS_MAX: usize = 16_384;

/// Records, where there is no trace yet.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    limit: Duration,
    active: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    seen: Vec<bool>,
    order: Vec<u32>,
    began: Option<Instant>,
}

impl Recorder {
    /// For a layer's folder; records nothing where a trace is there.
    pub fn new(folder: &Path, chunks: u32, limit: Duration) -> Self {
        let path = folder.join("trace");
        let active = !limit.is_zero() && !path.exists();
        Recorder {
            path,
            limit,
            active: AtomicBool::new(active),
            state: Mutex::new(State {
                seen: vec![false; if active { chunks as usize } else { 0 }],
                order: Vec::new(),
                began: None,
            }),
        }
    }

    /// These chunks are read now.
    pub fn note(&self, chunks: std::ops::RangeInclusive<u32>) {
        if !self.active.load(Ordering::Relaxed) {
            return;
        }
        let mut state = lock(&self.state);
        state.began.get_or_insert_with(Instant::now);
        for chunk in chunks {
            if !std::mem::replace(&mut state.seen[chunk as usize], true) {
                state.order.push(chunk);
            }
        }
    }

    /// Write the trace down if its time is over (or `now`). Call it now and then.
    pub fn settle(&self, now: bool) -> Result<()> {
        if !self.active.load(Ordering::Relaxed) {
            return Ok(());
        }
        let state = lock(&self.state);
        let over = state
            .began
            .is_some_and(|began| now || began.elapsed() >= self.limit);
        if !over && state.order.len() < CHUNKS_MAX {
            return Ok(());
        }
        self.active.store(false, Ordering::Relaxed);
        let bytes: Vec<u8> = state
            .order
            .iter()
            .take(CHUNKS_MAX)
            .flat_map(|chunk| chunk.to_le_bytes())
            .collect();
        drop(state);
        let half = self.path.with_extension("new");
        let told = |e: std::io::Error| Error::io(half.display(), &e);
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&half)
            .map_err(told)?;
        file.write_all(&bytes).map_err(told)?;
        file.sync_all().map_err(told)?;
        std::fs::rename(&half, &self.path).map_err(told)
    }
}

/// The trace of a layer's folder; nothing where there is none. Only hints: what cannot be is
/// left out.
pub fn load(folder: &Path, chunks: u32) -> Vec<u32> {
    let Ok(data) = std::fs::read(folder.join("trace")) else {
        return Vec::new();
    };
    let (words, _rest) = data.as_chunks::<4>();
    let order = words
        .iter()
        .take(CHUNKS_MAX)
        .map(|word| u32::from_le_bytes(*word));
    order.filter(|chunk| *chunk < chunks).collect()
}
