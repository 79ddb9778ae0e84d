// SPDX-License-Identifier: Apache-2.0
//! What the edge costs: the same traffic sent straight to an agent and through the edge, in turns
//! of one run, so that only the ratios count.
//!
//! `cargo run --profile edge --example edge_bench -- EDGE_BINARY [AGENT_ADDRESS]`
//!
//! Without an agent's address a minimal one inside this program answers: it does almost nothing,
//! so its latency ratios are the worst possible ones. With one, calls of `true` are measured too.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};

const ID: &str = "iabcd0123456789abcde";
const MINIMAL_ID: &str = "imin0000000000000000";
const TOTAL_BYTES: u64 = 1 << 30;
const BLOCK_BYTES: usize = 256 * 1024;
const REQUESTS: usize = 6_000;
const EXEC_REQUESTS: usize = 600;
const ROUNDS: usize = 3;
const IDLE_CONNECTIONS: usize = 10_000;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let binary = PathBuf::from(
        arguments
            .next()
            .ok_or("usage: edge_bench EDGE_BINARY [AGENT_ADDRESS]")?,
    );
    let real: Option<SocketAddr> = arguments.next().map(|text| text.parse()).transpose()?;
    rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit {
            current: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
            maximum: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
        },
    )?;
    let minimal = minimal_agent().await?;
    let edge = Edge::start(&binary, minimal, real).await?;
    println!("edge idle: {} KiB resident", edge.memory_kib()?);
    latency(
        "GET, minimal agent",
        minimal,
        edge.address,
        &small(MINIMAL_ID),
        REQUESTS,
    )
    .await?;
    if let Some(agent) = real {
        latency(
            "GET /health, real agent",
            agent,
            edge.address,
            &health(),
            REQUESTS,
        )
        .await?;
        latency(
            "Start `true`, real agent",
            agent,
            edge.address,
            &start_true(),
            EXEC_REQUESTS,
        )
        .await?;
    }
    throughput("download 1 GiB", &edge, minimal, download).await?;
    throughput("upload 1 GiB", &edge, minimal, upload).await?;
    if let Some(agent) = real {
        throughput("file upload 1 GiB, real agent", &edge, agent, upload_file).await?;
        throughput(
            "file download 1 GiB, real agent",
            &edge,
            agent,
            download_file,
        )
        .await?;
    }
    idle(&edge).await
}

struct Edge {
    address: SocketAddr,
    process: Child,
    _dir: tempfile::TempDir,
}

impl Edge {
    async fn start(binary: &Path, minimal: SocketAddr, real: Option<SocketAddr>) -> Outcome<Self> {
        let dir = tempfile::tempdir()?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        serve_control(
            &dir.path().join("control"),
            minimal,
            real.unwrap_or(minimal),
        )?;
        let process = Command::new(binary)
            .args([
                "--listen",
                &address.to_string(),
                "--domain",
                "localhost",
                "--api-socket",
            ])
            .arg(dir.path().join("api"))
            .arg("--control-socket")
            .arg(dir.path().join("control"))
            .stderr(Stdio::null())
            .spawn()?;
        for _ in 0..1_000 {
            if TcpStream::connect(address).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
                return Ok(Edge {
                    address,
                    process,
                    _dir: dir,
                });
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err("the edge does not listen".into())
    }

    fn memory_kib(&self) -> Outcome<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS"))
            .ok_or("no VmRSS")?;
        Ok(line.split_whitespace().nth(1).ok_or("no figure")?.parse()?)
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        // It ends with this program in any case.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Routes: `imin…` to the minimal agent, anything else to the real one.
fn serve_control(path: &Path, minimal: SocketAddr, real: SocketAddr) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = vec![0; 4096];
                let count = stream.read(&mut head).await.unwrap_or(0);
                let head = String::from_utf8_lossy(&head[..count]).into_owned();
                if head.contains("/invalidations") {
                    let hello = "HTTP/1.1 200 OK\r\n\r\n{\"event\":\"hello\"}\n";
                    drop(stream.write_all(hello.as_bytes()).await);
                    loop {
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        if stream.write_all(b"{\"event\":\"ping\"}\n").await.is_err() {
                            return;
                        }
                    }
                }
                let id = if head.contains("/imin") {
                    MINIMAL_ID
                } else {
                    ID
                };
                let agent = if id == MINIMAL_ID { minimal } else { real };
                let body = format!(
                    r#"{{"sandbox_id":"{id}","state":"running","address":"{}","agent_port":{},"control_token":"c","traffic_token":"t"}}"#,
                    agent.ip(),
                    agent.port()
                );
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                drop(stream.write_all(answer.as_bytes()).await);
            });
        }
    });
    Ok(())
}

/// `GET /small`, `GET /big` and `POST /sink`, with as little work as possible.
async fn minimal_agent() -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // A client that leaves ends its connection's task.
            tokio::spawn(async move { drop(serve_minimal(stream).await) });
        }
    });
    Ok(address)
}

async fn serve_minimal(mut stream: TcpStream) -> Outcome<()> {
    stream.set_nodelay(true)?;
    let block = vec![0x5a; BLOCK_BYTES];
    let mut buffer = Vec::new();
    loop {
        let (head, mut extra) = read_head(&mut stream, &mut buffer).await?;
        if head.starts_with("GET /big") {
            stream
                .write_all(
                    format!("HTTP/1.1 200 OK\r\nContent-Length: {TOTAL_BYTES}\r\n\r\n").as_bytes(),
                )
                .await?;
            let mut left = TOTAL_BYTES;
            while left > 0 {
                stream.write_all(&block).await?;
                left -= block.len() as u64;
            }
            continue;
        }
        if head.starts_with("POST /sink") {
            let mut scratch = vec![0; BLOCK_BYTES];
            while extra < TOTAL_BYTES {
                extra += positive(stream.read(&mut scratch).await?)?;
            }
            buffer.clear();
        }
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            .await?;
    }
}

fn positive(count: usize) -> Outcome<u64> {
    if count == 0 {
        Err("the connection ended early".into())
    } else {
        Ok(count as u64)
    }
}

/// Read a head; what came behind it stays in `buffer`, and its length is returned.
async fn read_head(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Outcome<(String, u64)> {
    loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            let head: Vec<u8> = buffer.drain(..at + 4).collect();
            return Ok((
                String::from_utf8_lossy(&head).into_owned(),
                buffer.len() as u64,
            ));
        }
        let mut chunk = [0; 16 * 1024];
        let count = stream.read(&mut chunk).await?;
        positive(count)?;
        buffer.extend_from_slice(&chunk[..count]);
    }
}

fn routed(line: &str, id: &str, rest: &str) -> Vec<u8> {
    format!(
        "{line} HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: {}\r\n{rest}\r\n",
        token()
    )
    .into_bytes()
}

fn token() -> String {
    std::env::var("ACCESS_TOKEN").unwrap_or_default()
}

fn small(id: &str) -> Vec<u8> {
    routed("GET /small", id, "")
}

fn health() -> Vec<u8> {
    routed("GET /health", ID, "")
}

fn start_true() -> Vec<u8> {
    let body = br#"{"process":{"cmd":"/bin/true","args":[],"envs":{}},"stdin":false}"#;
    let rest = format!(
        "Content-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\nContent-Length: {}\r\n",
        body.len() + 5
    );
    let mut request = routed("POST /process.Process/Start", ID, &rest);
    request.push(0);
    request.extend_from_slice(&(body.len() as u32).to_be_bytes());
    request.extend_from_slice(body);
    request
}

/// Read one whole answer: without a body, of known length, or chunked.
async fn read_answer(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Outcome<()> {
    let (head, _) = read_head(stream, buffer).await?;
    if !head.starts_with("HTTP/1.1 2") {
        return Err(head.into());
    }
    let lower = head.to_ascii_lowercase();
    let mut chunk = [0; 16 * 1024];
    if lower.contains("transfer-encoding: chunked") {
        while !buffer.ends_with(b"0\r\n\r\n") {
            let count = stream.read(&mut chunk).await?;
            positive(count)?;
            buffer.extend_from_slice(&chunk[..count]);
        }
        buffer.clear();
        return Ok(());
    }
    let length = lower
        .lines()
        .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let length: usize = length.unwrap_or(0);
    while buffer.len() < length {
        let count = stream.read(&mut chunk).await?;
        positive(count)?;
        buffer.extend_from_slice(&chunk[..count]);
    }
    buffer.drain(..length);
    Ok(())
}

/// Answer times of `count` requests over `concurrency` kept connections, sorted, in µs.
async fn times_us(
    target: SocketAddr,
    request: &[u8],
    concurrency: usize,
    count: usize,
) -> Outcome<Vec<u64>> {
    let mut tasks = Vec::new();
    for _ in 0..concurrency {
        let request = request.to_vec();
        tasks.push(tokio::spawn(async move {
            let mut stream = TcpStream::connect(target).await?;
            stream.set_nodelay(true)?;
            let mut buffer = Vec::new();
            let mut times = Vec::new();
            for _ in 0..count / concurrency {
                let begun = Instant::now();
                stream.write_all(&request).await?;
                read_answer(&mut stream, &mut buffer).await?;
                times.push(u64::try_from(begun.elapsed().as_micros())?);
            }
            Outcome::Ok(times)
        }));
    }
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await??);
    }
    all.sort_unstable();
    Ok(all)
}

fn percentile(sorted: &[u64], share: f64) -> u64 {
    let index = (sorted.len() as f64 * share) as usize;
    sorted[index.min(sorted.len() - 1)]
}

async fn latency(
    name: &str,
    agent: SocketAddr,
    edge: SocketAddr,
    request: &[u8],
    count: usize,
) -> Outcome<()> {
    println!("{name}: µs at p50/p95/p99");
    for concurrency in [1, 10, 50] {
        let (mut direct, mut through) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            direct.extend(times_us(agent, request, concurrency, count / ROUNDS).await?);
            through.extend(times_us(edge, request, concurrency, count / ROUNDS).await?);
        }
        direct.sort_unstable();
        through.sort_unstable();
        let figures = |sorted: &[u64]| [0.5, 0.95, 0.99].map(|share| percentile(sorted, share));
        let (direct, through) = (figures(&direct), figures(&through));
        let ratio = through[0] as f64 / direct[0] as f64;
        println!("  c={concurrency:<3} direct {direct:?}  edge {through:?}  p50 ratio {ratio:.2}");
        io::stdout().flush()?;
    }
    Ok(())
}

async fn download(target: SocketAddr) -> Outcome<()> {
    read_body(target, &routed("GET /big", MINIMAL_ID, "")).await
}

async fn download_file(target: SocketAddr) -> Outcome<()> {
    read_body(
        target,
        &routed("GET /files?path=/tmp/edge_bench.bin", ID, ""),
    )
    .await
}

async fn read_body(target: SocketAddr, request: &[u8]) -> Outcome<()> {
    let mut stream = TcpStream::connect(target).await?;
    stream.write_all(request).await?;
    let mut buffer = Vec::new();
    let (head, mut have) = read_head(&mut stream, &mut buffer).await?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(head.into());
    }
    let mut scratch = vec![0; BLOCK_BYTES];
    while have < TOTAL_BYTES {
        have += positive(stream.read(&mut scratch).await?)?;
    }
    Ok(())
}

async fn upload(target: SocketAddr) -> Outcome<()> {
    let rest = format!("Content-Length: {TOTAL_BYTES}\r\n");
    send_body(target, &routed("POST /sink", MINIMAL_ID, &rest)).await
}

async fn upload_file(target: SocketAddr) -> Outcome<()> {
    let rest =
        format!("Content-Type: application/octet-stream\r\nContent-Length: {TOTAL_BYTES}\r\n");
    send_body(
        target,
        &routed("POST /files?path=/tmp/edge_bench.bin", ID, &rest),
    )
    .await
}

async fn send_body(target: SocketAddr, request: &[u8]) -> Outcome<()> {
    let mut stream = TcpStream::connect(target).await?;
    stream.write_all(request).await?;
    let block = vec![0xa5; BLOCK_BYTES];
    let mut left = TOTAL_BYTES;
    while left > 0 {
        stream.write_all(&block).await?;
        left -= block.len() as u64;
    }
    read_answer(&mut stream, &mut Vec::new()).await
}

async fn throughput<F, R>(name: &str, edge: &Edge, agent: SocketAddr, transfer: F) -> Outcome<()>
where
    F: Fn(SocketAddr) -> R,
    R: Future<Output = Outcome<()>>,
{
    let (mut direct, mut through) = (Duration::MAX, Duration::MAX);
    let before = edge.memory_kib()?;
    let peak = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let status = format!("/proc/{}/statm", edge.process.id());
    let watcher = std::thread::spawn({
        let (peak, stop) = (Arc::clone(&peak), Arc::clone(&stop));
        move || {
            while !stop.load(Ordering::Relaxed) {
                let pages = std::fs::read_to_string(&status)
                    .ok()
                    .and_then(|text| text.split(' ').nth(1).and_then(|word| word.parse().ok()));
                peak.fetch_max(pages.unwrap_or(0u64) * 4, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        transfer(agent).await?;
        direct = direct.min(begun.elapsed());
        let begun = Instant::now();
        transfer(edge.address).await?;
        through = through.min(begun.elapsed());
    }
    stop.store(true, Ordering::Relaxed);
    watcher.join().map_err(|_| "the memory watcher failed")?;
    let rate = |time: Duration| TOTAL_BYTES as f64 / (1 << 20) as f64 / time.as_secs_f64();
    let ratio = rate(through) / rate(direct);
    println!(
        "{name}: direct {:.0} MiB/s, edge {:.0} MiB/s, ratio {ratio:.2}; edge's memory {before} KiB before, {} KiB at most",
        rate(direct),
        rate(through),
        peak.load(Ordering::Relaxed)
    );
    Ok(())
}

async fn idle(edge: &Edge) -> Outcome<()> {
    let before = edge.memory_kib()?;
    let mut held = Vec::new();
    for _ in 0..IDLE_CONNECTIONS {
        held.push(TcpStream::connect(edge.address).await?);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let silent = edge.memory_kib()? - before;
    let request = small(MINIMAL_ID);
    for stream in &mut held {
        stream.write_all(&request).await?;
        read_answer(stream, &mut Vec::new()).await?;
    }
    // They give up their buffers after a while at rest.
    tokio::time::sleep(Duration::from_secs(9)).await;
    let used = edge.memory_kib()? - before;
    let per = |kib: u64| kib as f64 / IDLE_CONNECTIONS as f64;
    println!(
        "{IDLE_CONNECTIONS} idle connections: {:.2} KiB each before a first request, {:.2} KiB each after one",
        per(silent),
        per(used)
    );
    let fresh = times_us(edge.address, &request, 1, 300).await?;
    println!(
        "  and a request beside them takes {} µs at p50",
        percentile(&fresh, 0.5)
    );
    Ok(())
}
