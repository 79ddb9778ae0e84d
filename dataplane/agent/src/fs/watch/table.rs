// SPDX-License-Identifier: Apache-2.0
//! Watchers that are asked for their events, and the count of all watches.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::pump::Events;
use crate::connect::RpcError;
use crate::limits::{WATCH_EVENTS_MAX, WATCHER_IDLE, WATCHERS_MAX};

#[derive(Default)]
struct Held {
    events: Vec<String>,
    error: Option<RpcError>,
}

struct Watcher {
    held: Arc<Mutex<Held>>,
    asked: Instant,
    collector: AbortHandle,
    _place: WatchPlace,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.collector.abort();
    }
}

/// The table of watchers.
#[derive(Default)]
pub struct WatcherTable {
    watchers: Mutex<HashMap<String, Watcher>>,
    count: Arc<AtomicUsize>,
}

/// A place among all watches, free again when dropped.
pub struct WatchPlace(Arc<AtomicUsize>);

impl Drop for WatchPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WatcherTable {
    /// Takes a place for a watch. If all are taken, the watcher that was not asked for the longest
    /// time goes, if that time is long.
    ///
    /// Errors: `resource_exhausted`.
    pub fn reserve(&self) -> Result<WatchPlace, RpcError> {
        if self.count.load(Ordering::Relaxed) >= WATCHERS_MAX {
            let mut watchers = lock(&self.watchers);
            let oldest = watchers.iter().min_by_key(|(_, watcher)| watcher.asked);
            let oldest = oldest.filter(|(_, watcher)| watcher.asked.elapsed() > WATCHER_IDLE);
            let oldest = oldest.map(|(id, _)| id.clone());
            let Some(id) = oldest else {
                return Err(RpcError::exhausted(format!(
                    "{WATCHERS_MAX} directories are watched in this sandbox, stop some"
                )));
            };
            watchers.remove(&id);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(WatchPlace(Arc::clone(&self.count)))
    }

    /// Enters a watcher; its events are collected from now on. Must run inside the runtime.
    pub fn enter(&self, place: WatchPlace, events: mpsc::Receiver<Events>) -> String {
        let held = Arc::new(Mutex::new(Held::default()));
        let collector = tokio::spawn(collect(Arc::clone(&held), events)).abort_handle();
        let id = new_id();
        let watcher = Watcher {
            held,
            asked: Instant::now(),
            collector,
            _place: place,
        };
        lock(&self.watchers).insert(id.clone(), watcher);
        id
    }

    /// The events since the last call, oldest first.
    ///
    /// Errors: `not_found`; `resource_exhausted` if events were lost, then always.
    pub fn take(&self, id: &str) -> Result<Vec<String>, RpcError> {
        let mut watchers = lock(&self.watchers);
        let watcher = watchers.get_mut(id).ok_or_else(|| unknown(id))?;
        watcher.asked = Instant::now();
        let mut held = lock(&watcher.held);
        match &held.error {
            // What came before the error is still told.
            Some(err) if held.events.is_empty() => Err(err.clone()),
            _ => Ok(std::mem::take(&mut held.events)),
        }
    }

    /// Ends a watcher.
    ///
    /// Errors: `not_found`.
    pub fn remove(&self, id: &str) -> Result<(), RpcError> {
        lock(&self.watchers)
            .remove(id)
            .map(drop)
            .ok_or_else(|| unknown(id))
    }
}

async fn collect(held: Arc<Mutex<Held>>, mut events: mpsc::Receiver<Events>) {
    while let Some(batch) = events.recv().await {
        let mut held = lock(&held);
        match batch {
            Ok(batch) if held.events.len() + batch.len() <= WATCH_EVENTS_MAX => {
                held.events.extend(batch);
            }
            Ok(_) => {
                held.error = Some(RpcError::exhausted(format!(
                    "more than {WATCH_EVENTS_MAX} events were not fetched: the later ones are \
                     lost, make a new watcher and list the directory"
                )));
                return;
            }
            Err(err) => {
                held.error = Some(err);
                return;
            }
        }
    }
}

fn unknown(id: &str) -> RpcError {
    RpcError::not_found(format!("watcher with id {id} not found"))
}

fn new_id() -> String {
    let mut raw = [0; 16];
    let _ = rustix::rand::getrandom(&mut raw, rustix::rand::GetRandomFlags::empty());
    format!("w{:032x}", u128::from_ne_bytes(raw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::Code;

    #[tokio::test]
    async fn too_many_events_end_in_an_error_that_stays() {
        let table = WatcherTable::default();
        let (queue, events) = mpsc::channel(1);
        let id = table.enter(table.reserve().unwrap(), events);
        queue.send(Ok(vec!["a".into()])).await.unwrap();
        queue
            .send(Ok(vec!["x".into(); WATCH_EVENTS_MAX]))
            .await
            .unwrap();
        queue.closed().await;
        assert_eq!(table.take(&id).unwrap(), ["a"]);
        for _ in 0..2 {
            assert_eq!(table.take(&id).unwrap_err().code, Code::ResourceExhausted);
        }
        table.remove(&id).unwrap();
        assert_eq!(table.take(&id).unwrap_err().code, Code::NotFound);
        assert_eq!(table.remove(&id).unwrap_err().code, Code::NotFound);
    }

    #[test]
    fn places_are_counted() {
        let table = WatcherTable::default();
        let places: Vec<_> = (0..WATCHERS_MAX)
            .map(|_| table.reserve().unwrap())
            .collect();
        assert!(table.reserve().is_err());
        drop(places);
        assert!(table.reserve().is_ok());
    }
}
