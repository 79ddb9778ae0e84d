// SPDX-License-Identifier: Apache-2.0
//! Routes that were asked for once, and how they are forgotten.
//!
//! The cache holds nothing that a restart would lose: every entry can be asked for again. Misses
//! are single-flight per sandbox, port and tokens: the control plane may resume a paused sandbox
//! for a request, and one with a wrong token neither gains from the right one's answer nor spoils
//! it. A look-up that was under way when its sandbox was invalidated still answers its waiters but
//! is not kept; one that nobody waits for any more is given up.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
};
use std::time::Instant;

use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::control::{Control, LookupError, Route, Visitor};
use crate::limits::{
    GONE_GRACE, QUESTIONS_PER_SANDBOX_MAX, RECHECKS_MAX, ROUTES_MAX, SWEEP_INTERVAL,
};
use crate::link::Link;
use crate::log::{Level, event};
use crate::metrics::{METRICS, UpstreamFailure};
use crate::routing::SignedFile;

/// A route and the connections behind it.
#[derive(Debug)]
pub struct Entry {
    /// The route.
    pub route: Route,
    /// Pools and streams.
    pub link: Arc<Link>,
    used_s: AtomicU64,
}

type Answer = Result<Arc<Entry>, LookupError>;

/// Who asks: a request, or the edge itself (`None`), for which nothing is resumed.
type Asker = Option<Visitor>;

struct Flight {
    answer: Arc<watch::Sender<Option<Answer>>>,
    number: u64,
}

#[derive(Default)]
struct Flights {
    by_id: HashMap<String, HashMap<Asker, Flight>>,
    next: u64,
    /// Grows at every invalidation; look-ups by signature begun under an older one are not kept.
    generation: u64,
}

/// The routes.
pub struct RouteCache {
    control: Control,
    entries: RwLock<HashMap<String, Arc<Entry>>>,
    flights: Mutex<Flights>,
    links: Mutex<HashMap<String, Weak<Link>>>,
    rechecks: Semaphore,
    end: CancellationToken,
    started: Instant,
}

impl RouteCache {
    /// An empty cache; `end` is cancelled when the edge's streams must end.
    pub fn new(control: Control, end: CancellationToken) -> Arc<Self> {
        Arc::new(RouteCache {
            control,
            entries: RwLock::default(),
            flights: Mutex::default(),
            links: Mutex::default(),
            rechecks: Semaphore::new(RECHECKS_MAX),
            end,
            started: Instant::now(),
        })
    }

    /// The control plane behind it.
    pub fn control(&self) -> &Control {
        &self.control
    }

    // Each change under these locks is a single call, so the data is valid after any panic.
    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, Arc<Entry>>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, Arc<Entry>>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<String, Weak<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_s(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// The route of a sandbox, cached or asked for.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn get(self: &Arc<Self>, id: &str, visitor: &Visitor) -> Answer {
        let found = self.read().get(id).cloned();
        if let Some(entry) = found {
            if !entry.link.is_retired() {
                entry.used_s.store(self.now_s(), Ordering::Relaxed);
                METRICS.route_hits.add(1);
                return Ok(entry);
            }
            self.forget_entry(&entry);
        }
        self.ask(id, Some(visitor.clone())).await
    }

    /// The route again from the control plane, because `old` led nowhere. While the control plane is
    /// down `old` stays: the fault may be short.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn refresh(self: &Arc<Self>, old: &Arc<Entry>, visitor: &Visitor) -> Answer {
        self.forget_entry(old);
        let answer = self.ask(&old.route.sandbox_id, Some(visitor.clone())).await;
        if matches!(answer, Err(LookupError::Unavailable(_))) {
            self.write()
                .entry(old.route.sandbox_id.clone())
                .or_insert_with(|| Arc::clone(old));
        }
        answer
    }

    /// The route of the sandbox whose token made a signature. Signatures are not cached.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn by_signature(self: &Arc<Self>, file: &SignedFile) -> Answer {
        let generation = self.flights().generation;
        METRICS.route_misses.add(1);
        let route = self.control.route_by_signature(file).await?;
        let cached = self.read().get(&route.sandbox_id).cloned();
        match cached {
            Some(entry) if entry.route == route => Ok(entry),
            _ => {
                let keep = self.flights().generation == generation;
                Ok(self.accept(route, keep))
            }
        }
    }

    /// Drop this entry, if it is still the cached one.
    pub fn forget_entry(&self, entry: &Arc<Entry>) {
        let mut entries = self.write();
        if entries
            .get(&entry.route.sandbox_id)
            .is_some_and(|cached| Arc::ptr_eq(cached, entry))
        {
            entries.remove(&entry.route.sandbox_id);
        }
        drop(entries);
        entry.link.clear_idle();
    }

    async fn ask(self: &Arc<Self>, id: &str, asker: Asker) -> Answer {
        let ending = || Err(LookupError::Unavailable("The edge is ending".to_owned()));
        let mut answer = self.join_flight(id, asker)?;
        let waited = tokio::select! {
            waited = answer.wait_for(Option::is_some) => waited,
            () = self.end.cancelled() => return ending(),
        };
        match waited.as_deref() {
            Ok(Some(answer)) => answer.clone(),
            // The look-up's task ended without an answer: only at the end of the process.
            _ => ending(),
        }
    }

    fn join_flight(
        self: &Arc<Self>,
        id: &str,
        asker: Asker,
    ) -> Result<watch::Receiver<Option<Answer>>, LookupError> {
        let mut flights = self.flights();
        let number = flights.next;
        let questions = flights.by_id.entry(id.to_owned()).or_default();
        if let Some(flight) = questions.get(&asker) {
            return Ok(flight.answer.subscribe());
        }
        if questions.len() >= QUESTIONS_PER_SANDBOX_MAX {
            return Err(LookupError::Crowded);
        }
        METRICS.route_misses.add(1);
        let (sender, answer) = watch::channel(None);
        let sender = Arc::new(sender);
        let flight = Flight {
            answer: Arc::clone(&sender),
            number,
        };
        questions.insert(asker.clone(), flight);
        flights.next += 1;
        drop(flights);
        let cache = Arc::clone(self);
        let id = id.to_owned();
        // A task of its own: the first asker may leave while others wait.
        tokio::spawn(async move { cache.fly(&id, &asker, number, &sender).await });
        Ok(answer)
    }

    /// Ask, and answer everyone who waits; give up when nobody does.
    async fn fly(
        &self,
        id: &str,
        asker: &Asker,
        number: u64,
        waiters: &watch::Sender<Option<Answer>>,
    ) {
        let question = self.control.route(id, asker.as_ref());
        tokio::pin!(question);
        let route = loop {
            tokio::select! {
                route = &mut question => break route,
                () = waiters.closed() => {
                    // Askers join under the same lock, so none can slip in.
                    let mut flights = self.flights();
                    if waiters.receiver_count() == 0 {
                        remove_flight(&mut flights, id, asker, number);
                        return;
                    }
                }
            }
        };
        let kept = remove_flight(&mut self.flights(), id, asker, number);
        let answer = match route {
            Ok(route) => Ok(self.accept(route, kept)),
            Err(error) => {
                if matches!(error, LookupError::Unavailable(_)) {
                    METRICS.upstream_failed(UpstreamFailure::Control);
                }
                Err(error)
            }
        };
        waiters.send_replace(Some(answer));
    }

    /// Make an entry of a route, on the living link of the same incarnation if there is one.
    fn accept(&self, route: Route, keep: bool) -> Arc<Entry> {
        let link = self.link_for(&route);
        let entry = Arc::new(Entry {
            route,
            link,
            used_s: AtomicU64::new(self.now_s()),
        });
        if keep {
            let mut entries = self.write();
            entries.insert(entry.route.sandbox_id.clone(), Arc::clone(&entry));
            if entries.len() > ROUTES_MAX {
                evict_oldest(&mut entries);
            }
            METRICS.routes_cached.set(entries.len() as u64);
        }
        entry
    }

    fn link_for(&self, route: &Route) -> Arc<Link> {
        let mut links = self.links();
        if let Some(link) = links.get(&route.sandbox_id).and_then(Weak::upgrade) {
            if link.is_same_incarnation(route) {
                return link;
            }
            link.clear_idle();
            link.cut.cancel();
        }
        let link = Link::new(route, &self.end);
        links.insert(route.sandbox_id.clone(), Arc::downgrade(&link));
        link
    }

    /// Forget a sandbox's route. If it has streams under way, check that it still runs.
    pub fn invalidate(self: &Arc<Self>, id: &str) {
        METRICS.invalidations.add(1);
        let mut flights = self.flights();
        flights.generation += 1;
        flights.by_id.remove(id);
        drop(flights);
        let mut entries = self.write();
        entries.remove(id);
        METRICS.routes_cached.set(entries.len() as u64);
        drop(entries);
        let link = self.links().get(id).and_then(Weak::upgrade);
        if let Some(link) = link {
            self.drop_idle_and_recheck(id, &link);
        }
    }

    /// Forget everything; check every sandbox that has streams under way.
    pub fn invalidate_all(self: &Arc<Self>) {
        let mut flights = self.flights();
        flights.generation += 1;
        flights.by_id.clear();
        drop(flights);
        let mut entries = self.write();
        entries.clear();
        METRICS.routes_cached.set(0);
        drop(entries);
        let links: Vec<(String, Arc<Link>)> = self
            .links()
            .iter()
            .filter_map(|(id, link)| Some((id.clone(), link.upgrade()?)))
            .collect();
        for (id, link) in links {
            self.drop_idle_and_recheck(&id, &link);
        }
    }

    fn drop_idle_and_recheck(self: &Arc<Self>, id: &str, link: &Arc<Link>) {
        link.clear_idle();
        if link.is_active() {
            let cache = Arc::clone(self);
            let id = id.to_owned();
            let link = Arc::clone(link);
            tokio::spawn(async move { cache.recheck(&id, &link).await });
        }
    }

    /// End the streams of a sandbox that no longer runs. Its network may be gone without a packet,
    /// so waiting for the connections to break could take hours.
    async fn recheck(self: &Arc<Self>, id: &str, link: &Arc<Link>) {
        let Ok(permit) = self.rechecks.acquire().await else {
            return;
        };
        // Not for a visitor: looking after old streams must not resume a paused sandbox.
        let answer = self.ask(id, None).await;
        drop(permit);
        // Denied: it is paused, and visitors with a token may wake it.
        if matches!(answer, Err(LookupError::NotFound | LookupError::Denied)) {
            // From now on a route to it gets a new link: it may be resumed before the grace is over.
            link.retire();
            tokio::time::sleep(GONE_GRACE).await;
            if link.is_active() {
                event(
                    Level::Info,
                    "streams_of_gone_sandbox_ended",
                    &[("sandbox_id", id.into())],
                );
            }
            link.cut.cancel();
        }
    }

    /// Close old idle connections, for ever.
    pub async fn sweep(self: Arc<Self>) {
        let mut tick = tokio::time::interval(SWEEP_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let links: Vec<Arc<Link>> = {
                let mut links = self.links();
                links.retain(|_, link| link.strong_count() > 0);
                links.values().filter_map(Weak::upgrade).collect()
            };
            for link in links {
                link.sweep();
            }
        }
    }
}

/// Take a flight off the list; whether it was still on it, so that its answer may be kept.
fn remove_flight(flights: &mut Flights, id: &str, asker: &Asker, number: u64) -> bool {
    let Some(questions) = flights.by_id.get_mut(id) else {
        return false;
    };
    let current = questions
        .get(asker)
        .is_some_and(|flight| flight.number == number);
    if current {
        questions.remove(asker);
        if questions.is_empty() {
            flights.by_id.remove(id);
        }
    }
    current
}

fn evict_oldest(entries: &mut HashMap<String, Arc<Entry>>) {
    let mut ages: Vec<u64> = entries
        .values()
        .map(|entry| entry.used_s.load(Ordering::Relaxed))
        .collect();
    let (_, &mut limit, _) = ages.select_nth_unstable(ROUTES_MAX / 16);
    let mut left = ROUTES_MAX / 16;
    entries.retain(|_, entry| {
        let drop_it = left > 0 && entry.used_s.load(Ordering::Relaxed) <= limit;
        left -= usize::from(drop_it);
        !drop_it
    });
}
