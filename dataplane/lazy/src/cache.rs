// SPDX-License-Identifier: Apache-2.0
//! The chunks that were fetched: a sparse file, and a file with a mark per chunk.
//!
//! Neither is synced: after a loss of power a mark may stand for data that is not there. So a mark
//! of an earlier process means only that it is worth looking: such a chunk is checked against its
//! sum before it is used.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::index::Index;
use crate::{Error, Result};

const ABSENT: u8 = 0;
const MARKED: u8 = 1;
const GOOD: u8 = 2;

/// What a chunk's place in the cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Nothing.
    Absent,
    /// Perhaps the chunk: an earlier process marked it.
    Marked,
    /// The chunk.
    Good,
}

/// The local copy of a layer.
#[derive(Debug)]
pub struct Cache {
    data: File,
    marks: File,
    states: Vec<AtomicU8>,
}

impl Cache {
    /// Open it, or begin an empty one.
    pub fn open(folder: &Path, index: &Index) -> Result<Self> {
        let data = open(&folder.join("cache"), index.size)?;
        let marks = open(&folder.join("chunks"), u64::from(index.chunks()))?;
        let mut found = vec![0u8; index.chunks() as usize];
        marks
            .read_exact_at(&mut found, 0)
            .map_err(|e| Error::io("the marks", &e))?;
        let states = found
            .iter()
            .map(|mark| AtomicU8::new(u8::from(*mark == MARKED)))
            .collect();
        Ok(Cache {
            data,
            marks,
            states,
        })
    }

    /// What there is of a chunk.
    pub fn held(&self, chunk: u32) -> Held {
        match self.states[chunk as usize].load(Ordering::Acquire) {
            GOOD => Held::Good,
            MARKED => Held::Marked,
            _ => Held::Absent,
        }
    }

    /// How many chunks are here.
    pub fn count(&self) -> u32 {
        let here = self
            .states
            .iter()
            .filter(|s| s.load(Ordering::Relaxed) != ABSENT)
            .count();
        u32::try_from(here).unwrap_or(u32::MAX)
    }

    /// Look at a chunk that was marked: whether it is what it should be. It is dropped if not.
    pub fn confirm(&self, chunk: u32, index: &Index) -> bool {
        let mut data = vec![0; index.len_of(chunk)];
        let read = self.data.read_exact_at(&mut data, index.start(chunk));
        let good = read.is_ok() && index.is(chunk, &data);
        let state = if good { GOOD } else { ABSENT };
        self.states[chunk as usize].store(state, Ordering::Release);
        good
    }

    /// Keep a chunk that was checked.
    pub fn put(&self, chunk: u32, data: &[u8], index: &Index) -> Result<()> {
        let told = |e: std::io::Error| Error::io("the local cache cannot be written", &e);
        self.data
            .write_all_at(data, index.start(chunk))
            .map_err(told)?;
        self.marks
            .write_all_at(&[MARKED], u64::from(chunk))
            .map_err(told)?;
        self.states[chunk as usize].store(GOOD, Ordering::Release);
        Ok(())
    }

    /// Read what is here.
    pub fn read(&self, data: &mut [u8], at: u64) -> std::io::Result<()> {
        self.data.read_exact_at(data, at)
    }
}

fn open(path: &Path, len: u64) -> Result<File> {
    let told = |e: std::io::Error| Error::io(path.display(), &e);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(told)?;
    if file.metadata().map_err(told)?.len() != len {
        file.set_len(0).map_err(told)?;
        file.set_len(len).map_err(told)?;
    }
    Ok(file)
}
