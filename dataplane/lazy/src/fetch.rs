// SPDX-License-Identifier: Apache-2.0
//! Has chunks brought into the cache: one fetch per chunk however many want it, a bounded number
//! of requests at once, and an end to every wait.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::cache::{Cache, Held};
use crate::config::Remote;
use crate::index::Index;
use crate::source::Source;
use crate::status::{Counters, Status};
use crate::{Error, Result, lock};

/// One request asks for at most this much.
const RUN_BYTES: u32 = 1 << 20;
/// A chunk that is wrong this often will stay so.
const ALTERED_TRIES: u32 = 3;
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(2);

/// A layer: what is here of it, and the way to the rest.
#[derive(Debug)]
pub struct Layer {
    /// What it holds.
    pub index: Index,
    /// What is here.
    pub cache: Cache,
    /// What happened.
    pub counters: Counters,
    source: Arc<Source>,
    name: String,
    limits: Remote,
    flights: Mutex<HashMap<u32, Arc<Flight>>>,
    permits: Arc<Permits>,
}

/// A chunk on its way.
#[derive(Debug, Default)]
struct Flight {
    outcome: Mutex<Option<Result<()>>>,
    landed: Condvar,
}

impl Flight {
    fn land(&self, outcome: Result<()>) {
        *lock(&self.outcome) = Some(outcome);
        self.landed.notify_all();
    }

    fn wait(&self) -> Result<()> {
        let waiting = self
            .landed
            .wait_while(lock(&self.outcome), |outcome| outcome.is_none());
        let outcome = waiting.unwrap_or_else(std::sync::PoisonError::into_inner);
        outcome.clone().unwrap_or(Ok(()))
    }
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// A reader, who waits.
    Reader,
    /// A trace.
    Trace,
}

impl Layer {
    /// Put one together.
    pub fn new(index: Index, cache: Cache, source: Source, limits: Remote) -> Self {
        Layer {
            name: index.name(),
            permits: Arc::new(Permits::new(limits.parallel)),
            source: Arc::new(source),
            counters: Counters::default(),
            flights: Mutex::default(),
            index,
            cache,
            limits,
        }
    }

    /// What it tells of itself.
    pub fn status(&self) -> Status {
        self.counters.status(
            &self.name,
            self.index.size,
            self.index.chunk_bytes,
            self.index.chunks(),
            self.cache.count(),
        )
    }

    /// The chunks of a range that begins within the layer.
    pub fn chunks_of(&self, at: u64, len: u64) -> std::ops::RangeInclusive<u32> {
        let chunk = u64::from(self.index.chunk_bytes);
        let last = (at + len.max(1) - 1).min(self.index.size - 1);
        // Within the layer, so within its number of chunks.
        (at / chunk) as u32..=(last / chunk) as u32
    }

    /// Whether all of them can be read at once.
    pub fn has(&self, mut chunks: std::ops::RangeInclusive<u32>) -> bool {
        chunks.all(|chunk| self.cache.held(chunk) == Held::Good)
    }

    /// Have them all here. Blocks, for the time that the limits give at most.
    pub fn ensure(&self, chunks: std::ops::RangeInclusive<u32>, by: For) -> Result<()> {
        for chunk in chunks.clone() {
            if self.cache.held(chunk) == Held::Marked && !self.cache.confirm(chunk, &self.index) {
                self.counters.damaged_locally.fetch_add(1, Relaxed);
            }
        }
        let (claimed, others) = self.claim(chunks.clone(), by);
        let mut outcome = Ok(());
        for run in runs(&claimed, RUN_BYTES / self.index.chunk_bytes) {
            for (chunk, result) in self.fetch(run, by) {
                // Only those asked for count: what was read ahead may fail.
                if chunks.contains(&chunk) && outcome.is_ok() {
                    outcome.clone_from(&result);
                }
                if let Some(flight) = lock(&self.flights).remove(&chunk) {
                    flight.land(result);
                }
            }
        }
        for flight in others {
            outcome = outcome.and(flight.wait());
        }
        outcome
    }

    /// Take on what nobody fetches yet; the flights of the rest.
    fn claim(
        &self,
        chunks: std::ops::RangeInclusive<u32>,
        by: For,
    ) -> (Vec<u32>, Vec<Arc<Flight>>) {
        let (mut claimed, mut others) = (Vec::new(), Vec::new());
        let mut flights = lock(&self.flights);
        for chunk in chunks {
            // Looked at under the lock: a flight leaves the table after its chunk has come.
            if self.cache.held(chunk) == Held::Good {
                continue;
            }
            match flights.entry(chunk) {
                Entry::Occupied(entry) => others.push(entry.get().clone()),
                Entry::Vacant(entry) => {
                    entry.insert(Arc::default());
                    claimed.push(chunk);
                }
            }
        }
        if by == For::Reader
            && let (Some(first), Some(last)) = (claimed.first(), claimed.last())
        {
            // Read on in order: half as much again as was read before it, so that what is fetched
            // in vain stays below a third.
            let before = (1..=16).take_while(|n| {
                first
                    .checked_sub(*n)
                    .is_some_and(|c| self.cache.held(c) != Held::Absent)
            });
            let ahead = before.count() as u32 / 2;
            for chunk in *last + 1..(*last + 1 + ahead).min(self.index.chunks()) {
                if self.cache.held(chunk) != Held::Absent {
                    break;
                }
                let Entry::Vacant(entry) = flights.entry(chunk) else {
                    break;
                };
                entry.insert(Arc::default());
                claimed.push(chunk);
            }
        }
        (claimed, others)
    }

    /// Fetch neighbours in one request, again if it fails.
    fn fetch(&self, run: Run, by: For) -> Vec<(u32, Result<()>)> {
        let began = Instant::now();
        let waits = if self.counters.is_lost() {
            self.limits.lost_read_s
        } else {
            self.limits.read_s
        };
        let end = began + Duration::from_secs_f64(waits);
        let mut pause = PAUSE_FIRST;
        let mut altered = 0;
        let mut left: Vec<u32> = (run.first..run.first + run.count).collect();
        let why = loop {
            let error = match self.attempt(run, end) {
                Ok(data) => match self.keep(run, &data, &mut left, by) {
                    Ok(()) => break None,
                    Err(error) => {
                        altered += 1;
                        error
                    }
                },
                Err(error) => error,
            };
            self.counters.failed(&error.to_string());
            if altered >= ALTERED_TRIES {
                // It answers, and lies: as good as lost, until a right answer comes.
                self.counters.lost();
                break Some(error);
            }
            if Instant::now() + pause >= end || by == For::Trace {
                self.counters.lost();
                break Some(error);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MOST);
        };
        (run.first..run.first + run.count)
            .map(|chunk| match &why {
                Some(error) if left.contains(&chunk) => (chunk, Err(error.clone())),
                _ => (chunk, Ok(())),
            })
            .collect()
    }

    /// One request, within its own limit and the reader's.
    fn attempt(&self, run: Run, end: Instant) -> Result<Vec<u8>> {
        let permit = Permits::take(&self.permits, end)
            .ok_or_else(|| Error::new("the store is too slow for all that is asked of it"))?;
        let limit = end
            .saturating_duration_since(Instant::now())
            .min(Duration::from_secs_f64(self.limits.request_s))
            .max(PAUSE_FIRST);
        self.counters.requests.fetch_add(1, Relaxed);
        let at = self.index.start(run.first);
        let last = run.first + run.count - 1;
        let len = (self.index.start(last) - at) as usize + self.index.len_of(last);
        let size = self.index.size;
        match &*self.source {
            http @ Source::Http(_) => http.read(at, len, size, limit),
            Source::File(_) => {
                // A file system whose server is gone may keep a read for ever; its thread keeps
                // the permit as well, so there are never more of them than permits.
                let (told, heard) = mpsc::channel();
                let source = self.source.clone();
                std::thread::spawn(move || {
                    let _ = told.send(source.read(at, len, size, limit));
                    drop(permit);
                });
                heard
                    .recv_timeout(limit)
                    .unwrap_or_else(|_| Err(Error::new("the store's file system does not answer")))
            }
        }
    }

    /// Keep what is right of an answer.
    fn keep(&self, run: Run, data: &[u8], left: &mut Vec<u32>, by: For) -> Result<()> {
        let mut wrong = Ok(());
        let mut kept = Vec::new();
        for chunk in left.iter().copied() {
            let at = (self.index.start(chunk) - self.index.start(run.first)) as usize;
            let part = &data[at..at + self.index.len_of(chunk)];
            if !self.index.is(chunk, part) {
                self.counters.altered.fetch_add(1, Relaxed);
                wrong = Err(Error::new(format!(
                    "the store sent other bytes for chunk {chunk}"
                )));
                continue;
            }
            if let Err(error) = self.cache.put(chunk, part, &self.index) {
                wrong = Err(error);
                continue;
            }
            self.counters
                .bytes_fetched
                .fetch_add(part.len() as u64, Relaxed);
            self.counters.chunks_fetched.fetch_add(1, Relaxed);
            if by == For::Trace {
                self.counters.chunks_prefetched.fetch_add(1, Relaxed);
            }
            kept.push(chunk);
        }
        left.retain(|chunk| !kept.contains(chunk));
        if wrong.is_ok() {
            self.counters.found();
        }
        wrong
    }

    /// Fetch what a trace names, in its order, unless the store is lost.
    pub fn prefetch(&self, order: &[u32]) {
        for run in runs(order, RUN_BYTES / self.index.chunk_bytes) {
            if self.counters.is_lost() {
                return;
            }
            // A failure is told by the counters; readers ask again.
            let _ = self.ensure(run.first..=run.first + run.count - 1, For::Trace);
        }
    }

    /// While the store is lost: ask whether it is back.
    pub fn probe(&self) {
        if !self.counters.is_lost() {
            return;
        }
        // The last thing that was missing may be what the store has wrong, so any will do.
        let missing = (0..self.index.chunks()).find(|c| self.cache.held(*c) == Held::Absent);
        let run = Run {
            first: missing.unwrap_or(0),
            count: 1,
        };
        let end = Instant::now() + Duration::from_secs_f64(self.limits.lost_read_s);
        match self.attempt(run, end) {
            Ok(data) if self.index.is(run.first, &data) => self.counters.found(),
            Ok(_) => self
                .counters
                .failed("the store sends other bytes than were published"),
            Err(error) => self.counters.failed(&error.to_string()),
        }
    }
}

/// Chunks that lie side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    first: u32,
    count: u32,
}

fn runs(chunks: &[u32], most: u32) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    for &chunk in chunks {
        match found.last_mut() {
            Some(run) if run.first + run.count == chunk && run.count < most.max(1) => {
                run.count += 1
            }
            _ => found.push(Run {
                first: chunk,
                count: 1,
            }),
        }
    }
    found
}

/// How many requests may be under way.
#[derive(Debug)]
struct Permits {
    free: Mutex<usize>,
    returned: Condvar,
}

struct Permit(Arc<Permits>);

impl Permits {
    fn new(count: usize) -> Self {
        Permits {
            free: Mutex::new(count),
            returned: Condvar::new(),
        }
    }

    fn take(permits: &Arc<Permits>, end: Instant) -> Option<Permit> {
        let wait = end.saturating_duration_since(Instant::now());
        let waiting = permits
            .returned
            .wait_timeout_while(lock(&permits.free), wait, |free| *free == 0);
        let (mut free, timeout) = waiting.unwrap_or_else(std::sync::PoisonError::into_inner);
        if timeout.timed_out() {
            return None;
        }
        *free -= 1;
        Some(Permit(permits.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *lock(&self.0.free) += 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_fetched_together() {
        let found = runs(&[3, 4, 5, 9, 8, 1], 2);
        let expected = [(3, 2), (5, 1), (9, 1), (8, 1), (1, 1)];
        assert_eq!(found, expected.map(|(first, count)| Run { first, count }));
    }
}
