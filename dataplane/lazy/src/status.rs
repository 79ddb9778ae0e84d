// SPDX-License-Identifier: Apache-2.0
//! What a layer's process tells of itself.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::lock;

/// Counters since the process began.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes that the store sent and that were right.
    pub bytes_fetched: AtomicU64,
    /// Chunks of them.
    pub chunks_fetched: AtomicU64,
    /// Chunks of them that a trace asked for, before anybody read them.
    pub chunks_prefetched: AtomicU64,
    /// Requests to the store.
    pub requests: AtomicU64,
    /// Requests that failed.
    pub errors: AtomicU64,
    /// Chunks that were not what their sum says.
    pub altered: AtomicU64,
    /// Chunks of the local cache that were not what their sum says; they are fetched again.
    pub damaged_locally: AtomicU64,
    /// Reads that ended with EIO.
    pub reads_failed: AtomicU64,
    trouble: Mutex<Trouble>,
}

#[derive(Debug, Default)]
struct Trouble {
    lost_since: Option<f64>,
    last_error: Option<String>,
}

/// `status`, one JSON object.
#[derive(Debug, Serialize)]
pub struct Status {
    /// Of the process.
    pub pid: u32,
    /// Name of the layer.
    pub layer: String,
    /// Bytes of the layer.
    pub size_bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// How many it has.
    pub chunks: u32,
    /// How many of them are here.
    pub chunks_cached: u32,
    /// See `Counters`.
    pub bytes_fetched: u64,
    /// See `Counters`.
    pub chunks_fetched: u64,
    /// See `Counters`.
    pub chunks_prefetched: u64,
    /// See `Counters`.
    pub requests: u64,
    /// See `Counters`.
    pub errors: u64,
    /// See `Counters`.
    pub altered: u64,
    /// See `Counters`.
    pub damaged_locally: u64,
    /// See `Counters`.
    pub reads_failed: u64,
    /// Since when the store does not answer as it should, Unix seconds.
    pub lost_since: Option<f64>,
    /// The last thing that went wrong.
    pub last_error: Option<String>,
}

impl Counters {
    /// A request failed.
    pub fn failed(&self, why: &str) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        lock(&self.trouble).last_error = Some(why.to_owned());
    }

    /// The store counts as lost from now on.
    pub fn lost(&self) {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs_f64();
        lock(&self.trouble).lost_since.get_or_insert(now);
    }

    /// The store answers.
    pub fn found(&self) {
        lock(&self.trouble).lost_since = None;
    }

    /// Whether the store counts as lost.
    pub fn is_lost(&self) -> bool {
        lock(&self.trouble).lost_since.is_some()
    }

    /// All of it.
    pub fn status(
        &self,
        layer: &str,
        size_bytes: u64,
        chunk_bytes: u32,
        chunks: u32,
        cached: u32,
    ) -> Status {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let trouble = lock(&self.trouble);
        Status {
            pid: std::process::id(),
            layer: layer.to_owned(),
            size_bytes,
            chunk_bytes,
            chunks,
            chunks_cached: cached,
            bytes_fetched: of(&self.bytes_fetched),
            chunks_fetched: of(&self.chunks_fetched),
            chunks_prefetched: of(&self.chunks_prefetched),
            requests: of(&self.requests),
            errors: of(&self.errors),
            altered: of(&self.altered),
            damaged_locally: of(&self.damaged_locally),
            reads_failed: of(&self.reads_failed),
            lost_since: trouble.lost_since,
            last_error: trouble.last_error.clone(),
        }
    }
}
