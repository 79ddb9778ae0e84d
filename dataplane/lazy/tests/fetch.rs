// SPDX-License-Identifier: Apache-2.0
//! Fetching from stores that do what they should and what they should not. Needs no rights.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opendsec_lazy::cache::Cache;
use opendsec_lazy::config::Remote;
use opendsec_lazy::fetch::{For, Layer};
use opendsec_lazy::index::Index;
use opendsec_lazy::source::Source;

const CHUNK: u32 = 4096;
const CHUNKS: u32 = 40;

/// What the store does with each request for a range.
type Behaviour = Box<dyn Fn(&mut Vec<u8>) -> Answer + Send + Sync>;

#[derive(Clone, Copy, PartialEq)]
enum Answer {
    Send,
    Short,
    Error,
    Hang,
    Whole,
    OtherLength,
}

struct Store {
    requests: Mutex<Vec<(usize, usize)>>,
    behaviour: Mutex<Behaviour>,
    data: Vec<u8>,
    port: u16,
}

impl Store {
    fn start(data: Vec<u8>) -> Arc<Store> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = Arc::new(Store {
            requests: Mutex::default(),
            behaviour: Mutex::new(Box::new(|_| Answer::Send)),
            data,
            port: listener.local_addr().unwrap().port(),
        });
        let serving = store.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let store = serving.clone();
                std::thread::spawn(move || store.talk(connection));
            }
        });
        store
    }

    fn behave(&self, how: impl Fn(&mut Vec<u8>) -> Answer + Send + Sync + 'static) {
        *self.behaviour.lock().unwrap() = Box::new(how);
    }

    fn talk(&self, mut to: TcpStream) {
        let mut lines = BufReader::new(to.try_clone().unwrap()).lines();
        loop {
            let mut range = None;
            loop {
                match lines.next() {
                    Some(Ok(line)) if line.is_empty() => break,
                    Some(Ok(line)) => {
                        if let Some(text) = line.strip_prefix("range: bytes=") {
                            let (a, b) = text.split_once('-').unwrap();
                            range = Some((a.parse().unwrap(), b.parse().unwrap()));
                        }
                    }
                    _ => return,
                }
            }
            let (first, last): (usize, usize) = range.expect("every request has a range");
            self.requests.lock().unwrap().push((first, last));
            let mut body = self.data[first..=last].to_vec();
            let len = body.len();
            let answer = (self.behaviour.lock().unwrap())(&mut body);
            let size = self.data.len() + usize::from(answer == Answer::OtherLength);
            let status = match answer {
                Answer::Hang => return std::thread::sleep(Duration::from_secs(60)),
                Answer::Error => "503 Slow Down",
                Answer::Whole => "200 OK",
                _ => "206 Partial Content",
            };
            if answer == Answer::Short {
                body.truncate(len / 2);
            }
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-length: {len}\r\n\
                 content-range: bytes {first}-{last}/{size}\r\n\r\n"
            );
            if to.write_all(head.as_bytes()).is_err() || to.write_all(&body).is_err() {
                return;
            }
            if answer == Answer::Short {
                return;
            }
        }
    }
}

fn noise() -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..CHUNK * CHUNKS - 100).map(|_| next()).collect()
}

fn limits(source: &str) -> Remote {
    let text = format!(
        r#"{{"source":"{source}","request_s":0.5,"read_s":1.0,"lost_read_s":0.3,"parallel":4}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn layer_at(folder: &std::path::Path, data: &[u8], source: &str) -> Layer {
    let index = Index::of(&mut &data[..], CHUNK).unwrap();
    let cache = Cache::open(folder, &index).unwrap();
    Layer::new(index, cache, Source::parse(source).unwrap(), limits(source))
}

struct World {
    folder: tempfile::TempDir,
    data: Vec<u8>,
    store: Arc<Store>,
    layer: Arc<Layer>,
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let data = noise();
        let store = Store::start(data.clone());
        let layer = Arc::new(layer_at(folder.path(), &data, &url(&store)));
        World {
            folder,
            data,
            store,
            layer,
        }
    }

    fn read(&self, layer: &Layer, at: usize, len: usize) -> Option<Vec<u8>> {
        layer
            .ensure(layer.chunks_of(at as u64, len as u64), For::Reader)
            .ok()?;
        let mut out = vec![0; len];
        layer.cache.read(&mut out, at as u64).unwrap();
        Some(out)
    }

    fn is_right(&self, at: usize, len: usize) -> bool {
        self.read(&self.layer, at, len).as_deref() == Some(&self.data[at..at + len])
    }
}

fn url(store: &Store) -> String {
    format!("http://127.0.0.1:{}/layer", store.port)
}

#[test]
fn what_is_read_is_fetched_once_and_checked() {
    let world = World::new();
    assert!(world.is_right(5000, 10_000));
    assert!(world.is_right(world.data.len() - 10, 10));
    let before = world.store.requests.lock().unwrap().len();
    assert!(world.is_right(5000, 10_000));
    assert_eq!(world.store.requests.lock().unwrap().len(), before);
    let status = world.layer.status();
    assert_eq!(status.chunks_fetched, u64::from(status.chunks_cached));
    assert!(status.bytes_fetched < 6 * u64::from(CHUNK));
}

#[test]
fn two_readers_of_a_chunk_are_one_fetch() {
    let world = World::new();
    world.store.behave(|_| {
        std::thread::sleep(Duration::from_millis(100));
        Answer::Send
    });
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(world.is_right(20_000, 9_000)));
        }
    });
    assert_eq!(world.store.requests.lock().unwrap().len(), 1);
}

#[test]
fn altered_bytes_are_never_given_out() {
    let world = World::new();
    world.store.behave(|body| {
        body[17] ^= 1;
        Answer::Send
    });
    assert_eq!(world.read(&world.layer, 0, 100), None);
    let status = world.layer.status();
    assert!(status.altered >= 3 && status.lost_since.is_some());
    assert_eq!(status.chunks_cached, 0);
    // The right neighbours of a wrong chunk count.
    assert_eq!(world.read(&world.layer, 0, 3 * CHUNK as usize), None);
    assert!(world.is_right(CHUNK as usize, 2 * CHUNK as usize));
    world.store.behave(|_| Answer::Send);
    assert!(world.is_right(0, 100));
    assert!(world.layer.status().lost_since.is_none());
}

#[test]
fn stores_that_answer_wrongly_fail_within_their_time() {
    for answer in [
        Answer::Short,
        Answer::Error,
        Answer::Hang,
        Answer::Whole,
        Answer::OtherLength,
    ] {
        let world = World::new();
        assert!(world.is_right(0, 10));
        world.store.behave(move |_| answer);
        let began = Instant::now();
        assert_eq!(world.read(&world.layer, 100_000, 10), None);
        assert!(began.elapsed() < Duration::from_secs(10));
        assert!(world.is_right(0, 10), "what is here goes on");
        assert!(world.layer.status().lost_since.is_some());
        world.store.behave(|_| Answer::Send);
        world.layer.probe();
        assert!(world.layer.status().lost_since.is_none());
        assert!(world.is_right(100_000, 10));
    }
}

#[test]
fn a_short_fault_is_not_seen_by_the_reader() {
    let world = World::new();
    let count = AtomicU32::new(0);
    world.store.behave(move |_| {
        if count.fetch_add(1, Ordering::Relaxed) < 2 {
            Answer::Error
        } else {
            Answer::Send
        }
    });
    assert!(world.is_right(0, 10));
    assert_eq!(world.layer.status().errors, 2);
}

#[test]
fn a_warm_cache_is_used_and_a_damaged_one_is_found() {
    let world = World::new();
    assert!(world.is_right(0, world.data.len()));
    let again = || layer_at(world.folder.path(), &world.data, &url(&world.store));
    let before = world.store.requests.lock().unwrap().len();
    let layer = again();
    assert_eq!(layer.status().chunks_cached, CHUNKS);
    assert_eq!(
        world.read(&layer, 0, 9000).as_deref(),
        Some(&world.data[..9000])
    );
    assert_eq!(world.store.requests.lock().unwrap().len(), before);
    // As after a loss of power: marked, and not there.
    let cache = fs::OpenOptions::new()
        .write(true)
        .open(world.folder.path().join("cache"))
        .unwrap();
    cache.set_len(0).unwrap();
    cache.set_len(world.data.len() as u64).unwrap();
    let layer = again();
    assert_eq!(
        world.read(&layer, 0, 9000).as_deref(),
        Some(&world.data[..9000])
    );
    assert_eq!(layer.status().damaged_locally, 3);
}

#[test]
fn a_trace_is_fetched_ahead() {
    let world = World::new();
    world.layer.prefetch(&[7, 8, 9, 2]);
    assert!(world.layer.has(7..=9) && world.layer.has(2..=2));
    assert_eq!(world.layer.status().chunks_prefetched, 4);
    assert_eq!(world.store.requests.lock().unwrap().len(), 2);
}

#[test]
fn a_directory_that_goes_and_comes() {
    let folder = tempfile::tempdir().unwrap();
    let data = noise();
    let path = folder.path().join("data");
    fs::write(&path, &data).unwrap();
    let layer = layer_at(folder.path(), &data, path.to_str().unwrap());
    layer.ensure(0..=1, For::Reader).unwrap();
    fs::rename(&path, folder.path().join("away")).unwrap();
    assert!(layer.ensure(20..=20, For::Reader).is_err());
    layer.ensure(0..=1, For::Reader).unwrap();
    fs::rename(folder.path().join("away"), &path).unwrap();
    layer.ensure(20..=20, For::Reader).unwrap();
    assert!(layer.status().lost_since.is_none());
}
