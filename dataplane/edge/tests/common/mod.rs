// SPDX-License-Identifier: Apache-2.0
//! The real edge between a fake control plane and fake sandboxes, all on loopback.

#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Notify, broadcast, mpsc};
use tokio::task::JoinHandle;

pub const ID: &str = "iabcd0123456789abcde";
/// Nothing here should take this long; a test that does has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub type Body = UnsyncBoxBody<Bytes, Infallible>;

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed_unsync()
}

/// A body whose chunks the test sends; dropping the sender ends it.
pub fn channel_body() -> (mpsc::Sender<Bytes>, Body) {
    let (sender, receiver) = mpsc::channel::<Bytes>(1);
    let chunks = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver
            .recv()
            .await
            .map(|chunk| (Ok(Frame::data(chunk)), receiver))
    });
    (sender, StreamBody::new(chunks).boxed_unsync())
}

/// How the fake control plane treats a paused sandbox.
#[derive(Clone)]
pub enum Paused {
    /// Resumed, once the gate is open, for this access token (agent) or traffic token (ports).
    Wants(&'static str),
    /// Not resumed by anyone here.
    Sleeps,
    /// Answered so every time.
    Answers(u16, Value),
}

/// A look-up by id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub id: String,
    pub port: Option<String>,
    pub access: Option<String>,
    pub traffic: Option<String>,
}

impl Question {
    fn of(request: &Request<Incoming>) -> Option<Self> {
        let header = |name: &str| {
            let value = request.headers().get(name)?;
            Some(value.to_str().expect("text").to_owned())
        };
        let query = request.uri().query();
        Some(Question {
            id: request.uri().path().strip_prefix("/routes/")?.to_owned(),
            port: query.and_then(|query| Some(query.strip_prefix("port=")?.to_owned())),
            access: header("x-opendsec-access-token"),
            traffic: header("x-opendsec-traffic-token"),
        })
    }

    fn token(&self) -> Option<&str> {
        if self.port.as_deref() == Some("49983") {
            self.access.as_deref()
        } else {
            self.traffic.as_deref()
        }
    }
}

/// Counts a look-up that is dropped before it is answered.
struct Unanswered(Arc<ControlState>, bool);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if !self.1 {
            self.0.abandoned.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn refusal(status: u16, error: &Value) -> Response<Body> {
    let mut response = Response::new(full(json!({"error": error}).to_string()));
    *response.status_mut() = StatusCode::from_u16(status).expect("status");
    response
}

/// What the fake control plane knows and saw.
#[derive(Default)]
pub struct ControlState {
    pub routes: Mutex<HashMap<String, Value>>,
    pub signatures: Mutex<HashMap<String, String>>,
    pub signature_queries: Mutex<Vec<String>>,
    pub lookups: AtomicUsize,
    /// While set, look-ups wait for `gate`.
    pub gated: Mutex<bool>,
    pub gate: Notify,
    /// Sandboxes that are paused, and what they want to be resumed.
    pub paused: Mutex<HashMap<String, Paused>>,
    /// Look-ups by id, as they came.
    pub questions: Mutex<Vec<Question>>,
    /// Sockets of consoles, by `id?kind=…`, with the access token that opens them.
    pub consoles: Mutex<HashMap<String, (String, PathBuf)>>,
    /// Look-ups whose asker left before the answer.
    pub abandoned: AtomicUsize,
    pub streams: AtomicUsize,
}

pub struct Control {
    pub state: Arc<ControlState>,
    notices: broadcast::Sender<String>,
    path: PathBuf,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Control {
    fn start(path: &Path) -> Self {
        let control = Control {
            state: Arc::default(),
            notices: broadcast::channel(64).0,
            path: path.to_owned(),
            tasks: Mutex::default(),
        };
        control.resume();
        control
    }

    /// Close the socket and everything on it, as when the daemon is killed.
    pub fn stop(&self) {
        for task in self.tasks.lock().expect("lock").drain(..) {
            task.abort();
        }
        drop(std::fs::remove_file(&self.path));
    }

    /// Listen (again).
    pub fn resume(&self) {
        drop(std::fs::remove_file(&self.path));
        let listener = UnixListener::bind(&self.path).expect("control socket");
        let state = Arc::clone(&self.state);
        let notices = self.notices.clone();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.expect("accept");
                let (state, notices) = (Arc::clone(&state), notices.clone());
                connections.spawn(async move {
                    let service = service_fn(move |request| {
                        control_answer(Arc::clone(&state), notices.subscribe(), request)
                    });
                    let connection = hyper::server::conn::http1::Builder::new();
                    drop(
                        connection
                            .serve_connection(TokioIo::new(stream), service)
                            .await,
                    );
                });
            }
        });
        self.tasks.lock().expect("lock").push(task);
    }

    pub fn set(&self, id: &str, route: Value) {
        self.state
            .routes
            .lock()
            .expect("lock")
            .insert(id.to_owned(), route);
    }

    pub fn remove(&self, id: &str) {
        self.state.routes.lock().expect("lock").remove(id);
    }

    /// Pause a sandbox; its route stays, for when it is resumed.
    pub fn pause(&self, id: &str, paused: Paused) {
        let mut all = self.state.paused.lock().expect("lock");
        all.insert(id.to_owned(), paused);
    }

    pub fn shut_gate(&self) {
        *self.state.gated.lock().expect("lock") = true;
    }

    pub fn open_gate(&self) {
        *self.state.gated.lock().expect("lock") = false;
        self.state.gate.notify_waiters();
    }

    pub fn questions(&self) -> Vec<Question> {
        self.state.questions.lock().expect("lock").clone()
    }

    pub fn lookups(&self) -> usize {
        self.state.lookups.load(Ordering::SeqCst)
    }

    pub fn notify(&self, notice: Value) {
        self.notices
            .send(format!("{notice}\n"))
            .expect("an edge listens");
    }

    /// Wait until the edge has opened its `count`-th invalidation stream.
    pub async fn streams_opened(&self, count: usize) {
        until("invalidation stream", || {
            self.state.streams.load(Ordering::SeqCst) >= count
        })
        .await;
    }
}

async fn control_answer(
    state: Arc<ControlState>,
    mut notices: broadcast::Receiver<String>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path();
    if path == "/invalidations" {
        let (sender, body) = channel_body();
        tokio::spawn(async move {
            sender
                .send(Bytes::from_static(b"{\"event\":\"hello\"}\n"))
                .await
                .ok();
            state.streams.fetch_add(1, Ordering::SeqCst);
            while let Ok(line) = notices.recv().await {
                if sender.send(line.into()).await.is_err() {
                    return;
                }
            }
        });
        return Ok(Response::new(body));
    }
    if let Some(place) = request.uri().to_string().strip_prefix("/consoles/") {
        let token = request.headers().get("x-opendsec-access-token");
        let consoles = state.consoles.lock().expect("lock");
        return Ok(match consoles.get(place) {
            Some((wanted, socket)) if token.is_some_and(|token| token == wanted) => {
                Response::new(full(json!({ "socket": socket }).to_string()))
            }
            _ => refusal(401, &json!({"code": "unauthenticated", "message": "no"})),
        });
    }
    state.lookups.fetch_add(1, Ordering::SeqCst);
    let mut unanswered = Unanswered(Arc::clone(&state), false);
    let question = Question::of(&request);
    let paused = question.as_ref().and_then(|question| {
        let paused = state.paused.lock().expect("lock");
        paused.get(&question.id).cloned()
    });
    if let Some(question) = &question {
        state.questions.lock().expect("lock").push(question.clone());
        let conflict = json!({"code": "sandbox_state_conflict", "message": "it is paused", "details": {"state": "paused"}});
        let refused = match &paused {
            Some(Paused::Answers(status, error)) => Some(refusal(*status, error)),
            Some(Paused::Sleeps) => Some(refusal(409, &conflict)),
            Some(Paused::Wants(token)) if question.token() != Some(token) => Some(refusal(
                401,
                &json!({"code": "unauthenticated", "message": "no"}),
            )),
            _ => None,
        };
        if let Some(refused) = refused {
            unanswered.1 = true;
            return Ok(refused);
        }
    }
    let gated = *state.gated.lock().expect("lock");
    if gated {
        state.gate.notified().await;
    }
    unanswered.1 = true;
    if let Some(question) = &question {
        state.paused.lock().expect("lock").remove(&question.id);
    }
    let id = if path == "/routes/by-signature" {
        let query = request.uri().query().unwrap_or_default().to_owned();
        state
            .signature_queries
            .lock()
            .expect("lock")
            .push(query.clone());
        let known = state.signatures.lock().expect("lock");
        known
            .iter()
            .find(|(part, _)| query.contains(part.as_str()))
            .map(|(_, id)| id.clone())
    } else {
        path.strip_prefix("/routes/").map(str::to_owned)
    };
    if let Some(Paused::Answers(status, error)) = id
        .as_ref()
        .and_then(|id| state.paused.lock().expect("lock").get(id).cloned())
    {
        return Ok(refusal(status, &error));
    }
    let route = id.and_then(|id| state.routes.lock().expect("lock").get(&id).cloned());
    Ok(match route {
        Some(route) => Response::new(full(route.to_string())),
        None => {
            let error = json!({"error": {"code": "sandbox_not_found", "message": "gone"}});
            let mut response = Response::new(full(error.to_string()));
            *response.status_mut() = StatusCode::NOT_FOUND;
            response
        }
    })
}

/// The API: answers what it saw.
async fn api_answer(request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let headers: HashMap<String, String> = request
        .headers()
        .iter()
        .map(|(name, value)| {
            (
                name.to_string(),
                String::from_utf8_lossy(value.as_bytes()).into(),
            )
        })
        .collect();
    let (method, uri) = (request.method().to_string(), request.uri().to_string());
    let body = request
        .into_body()
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    let seen =
        json!({"api": true, "method": method, "uri": uri, "headers": headers, "bytes": body.len()});
    Ok(Response::new(full(seen.to_string())))
}

fn serve_api(path: &Path) -> JoinHandle<()> {
    drop(std::fs::remove_file(path));
    let listener = UnixListener::bind(path).expect("API socket");
    tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.expect("accept");
            connections.spawn(async move {
                let connection = hyper::server::conn::http1::Builder::new();
                drop(
                    connection
                        .serve_connection(TokioIo::new(stream), service_fn(api_answer))
                        .await,
                );
            });
        }
    })
}

/// How the edge is started.
#[derive(Default)]
pub struct Options {
    pub flags: Vec<String>,
    pub tls: bool,
}

impl Options {
    pub fn flags(flags: &[&str]) -> Self {
        Options {
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
            tls: false,
        }
    }
}

/// Edge, control plane and API.
pub struct World {
    pub edge: SocketAddr,
    pub control: Control,
    pub dir: tempfile::TempDir,
    pub api: Mutex<JoinHandle<()>>,
    pub certificate: Option<Bytes>,
    process: Mutex<Child>,
}

impl World {
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    pub async fn start_with(options: Options) -> Self {
        let dir = tempfile::tempdir().expect("temporary folder");
        let control = Control::start(&dir.path().join("control.sock"));
        let api = serve_api(&dir.path().join("api.sock"));
        let certificate = options.tls.then(|| write_certificate(dir.path()));
        let edge = free_address();
        let mut command = Command::new(env!("CARGO_BIN_EXE_opendsec-edge"));
        command
            .args(["--listen", &edge.to_string(), "--domain", "sbx.test:7300"])
            .arg("--api-socket")
            .arg(dir.path().join("api.sock"))
            .arg("--control-socket")
            .arg(dir.path().join("control.sock"))
            .args(&options.flags)
            .stderr(std::fs::File::create(dir.path().join("log")).expect("log file"))
            .stdout(Stdio::null());
        if options.tls {
            command.arg("--tls-cert").arg(dir.path().join("cert.pem"));
            command.arg("--tls-key").arg(dir.path().join("key.pem"));
        }
        let process = Mutex::new(command.spawn().expect("edge"));
        let world = World {
            edge,
            control,
            dir,
            api: Mutex::new(api),
            certificate,
            process,
        };
        world.control.streams_opened(1).await;
        until_connects(edge).await;
        world
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("log")
    }

    pub fn signal(&self, name: &str) {
        let pid = self.process.lock().expect("lock").id().to_string();
        let status = Command::new("kill")
            .args(["-s", name, &pid])
            .status()
            .expect("kill");
        assert!(status.success());
    }

    /// Wait for the edge to end by itself.
    pub async fn ended(&self) -> std::process::ExitStatus {
        let mut status = None;
        until("end of the edge", || {
            status = self.process.lock().expect("lock").try_wait().expect("wait");
            status.is_some()
        })
        .await;
        status.expect("ended")
    }

    pub fn memory_kb(&self) -> u64 {
        let pid = self.process.lock().expect("lock").id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS"))
            .expect("VmRSS");
        line.split_whitespace()
            .nth(1)
            .expect("figure")
            .parse()
            .expect("number")
    }

    pub fn add(&self, id: &str, agent: SocketAddr) {
        self.control.set(id, route(id, agent));
    }

    pub fn stop_api(&self) {
        self.api.lock().expect("lock").abort();
        drop(std::fs::remove_file(self.dir.path().join("api.sock")));
    }

    pub async fn connect(&self) -> Wire<TcpStream> {
        Wire::new(TcpStream::connect(self.edge).await.expect("connect"))
    }

    /// One request on a connection of its own.
    pub async fn ask(&self, request: &str) -> Answer {
        let mut wire = self.connect().await;
        wire.send(request).await;
        wire.answer().await
    }

    /// A request to a port of a sandbox, by headers.
    pub async fn get(&self, id: &str, port: u16, path: &str) -> Answer {
        self.ask(&to_port("GET", id, port, path, "")).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let mut process = self.process.lock().expect("lock");
        // It may have ended already.
        drop(process.kill());
        drop(process.wait());
        if std::thread::panicking() {
            eprintln!("edge's log:\n{}", self.log());
        }
    }
}

pub fn route(id: &str, agent: SocketAddr) -> Value {
    json!({
        "sandbox_id": id, "state": "running", "address": agent.ip().to_string(), "agent_port": agent.port(),
        "control_token": "secret", "traffic_token": "traffic", "allow_public_traffic": true,
        "mask_request_host": null, "https_ports": [],
    })
}

pub fn to_port(method: &str, id: &str, port: u16, path: &str, headers: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n{headers}\r\n"
    )
}

pub fn write_certificate(dir: &Path) -> Bytes {
    let names = vec!["localhost".to_owned(), "*.sbx.test".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).expect("certificate");
    std::fs::write(dir.join("cert.pem"), made.cert.pem()).expect("write");
    std::fs::write(dir.join("key.pem"), made.signing_key.serialize_pem()).expect("write");
    Bytes::copy_from_slice(made.cert.der())
}

fn free_address() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("address")
}

async fn until_connects(address: SocketAddr) {
    for _ in 0..2_000 {
        if TcpStream::connect(address).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the edge does not listen");
}

/// Poll until `done`, within bounds.
pub async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..4_000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never came: {what}");
}

/// Anything with a time limit, so that a hang fails.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("took too long: {what}"),
    }
}

/// A parsed answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
    /// Whether the body's end was explicit.
    pub complete: bool,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// A connection read and written by hand.
pub struct Wire<S> {
    pub stream: S,
    pub buffer: Vec<u8>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    pub fn new(stream: S) -> Self {
        Wire {
            stream,
            buffer: Vec::new(),
        }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        soon("send", self.stream.write_all(bytes.as_ref()))
            .await
            .expect("send");
    }

    /// Read more; false at the end (orderly or by reset).
    pub async fn more(&mut self) -> bool {
        let mut chunk = vec![0; 64 * 1024];
        match soon("read", self.stream.read(&mut chunk)).await {
            Ok(count) => {
                self.buffer.extend_from_slice(&chunk[..count]);
                count > 0
            }
            Err(_) => false,
        }
    }

    /// Read until the buffer holds `wanted`, and take everything to its end.
    pub async fn until(&mut self, wanted: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = find(&self.buffer, wanted) {
                return self.buffer.drain(..at + wanted.len()).collect();
            }
            assert!(
                self.more().await,
                "ended before {:?}: {:?}",
                String::from_utf8_lossy(wanted),
                String::from_utf8_lossy(&self.buffer)
            );
        }
    }

    pub async fn head(&mut self) -> (u16, String) {
        let head = String::from_utf8(self.until(b"\r\n\r\n").await).expect("ASCII head");
        let status = head
            .split(' ')
            .nth(1)
            .expect("status")
            .parse()
            .expect("number");
        (status, head)
    }

    /// As a server: the head of a request.
    pub async fn request_head(&mut self) -> (String, String) {
        let head = String::from_utf8(self.until(b"\r\n\r\n").await).expect("ASCII head");
        let line = head.lines().next().expect("request line").to_owned();
        (line, head)
    }

    /// One chunk of a chunked body; `None` for the last one; `Err` if the connection ended.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, ()> {
        let line = loop {
            if let Some(at) = find(&self.buffer, b"\r\n") {
                break self.buffer.drain(..at + 2).collect::<Vec<u8>>();
            }
            if !self.more().await {
                return Err(());
            }
        };
        let size = String::from_utf8(line).expect("size");
        let size = usize::from_str_radix(size.trim(), 16).expect("hexadecimal");
        while self.buffer.len() < size + 2 {
            if size == 0 {
                break;
            }
            if !self.more().await {
                return Err(());
            }
        }
        if size == 0 {
            return Ok(None);
        }
        let chunk = self.buffer.drain(..size).collect();
        self.buffer.drain(..2);
        Ok(Some(chunk))
    }

    pub async fn answer(&mut self) -> Answer {
        let (status, head) = loop {
            let (status, head) = self.head().await;
            if status != 100 {
                break (status, head);
            }
        };
        let mut answer = Answer {
            status,
            head,
            body: Vec::new(),
            complete: true,
        };
        if answer.header("transfer-encoding").is_some() {
            loop {
                match self.chunk().await {
                    Ok(Some(chunk)) => answer.body.extend(chunk),
                    Ok(None) => break,
                    Err(()) => {
                        answer.complete = false;
                        return answer;
                    }
                }
            }
            self.until(b"\r\n").await;
        } else if let Some(length) = answer.header("content-length") {
            let length: usize = length.parse().expect("length");
            while self.buffer.len() < length {
                if !self.more().await {
                    answer.complete = false;
                    break;
                }
            }
            let length = length.min(self.buffer.len());
            answer.body = self.buffer.drain(..length).collect();
        }
        answer
    }

    /// Whether the other side has closed, with nothing more to read.
    pub async fn closed(&mut self) -> bool {
        self.buffer.is_empty() && !self.more().await
    }
}

pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

/// A listener that hands each connection to `serve`.
pub async fn tcp_server<F, R>(serve: F) -> SocketAddr
where
    F: Fn(Wire<TcpStream>) -> R + Send + Sync + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("accept");
            tokio::spawn(serve(Wire::new(stream)));
        }
    });
    address
}

/// A sandbox's agent with a tunnel to ports on loopback, and `serve` for everything else.
pub async fn agent<F, R>(serve: F) -> SocketAddr
where
    F: Fn(Request<Incoming>) -> R + Send + Sync + 'static,
    R: Future<Output = Response<Body>> + Send + 'static,
{
    let serve = Arc::new(serve);
    tcp_server(move |wire| {
        let serve = Arc::clone(&serve);
        async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let serve = Arc::clone(&serve);
                async move {
                    Ok::<_, Infallible>(if request.uri().path() == "/opendsec/tunnel" {
                        tunnel(request).await
                    } else {
                        serve(request).await
                    })
                }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(wire.stream), service)
                .with_upgrades();
            drop(connection.await);
        }
    })
    .await
}

/// An agent that answers what it saw, as the API does.
pub async fn echo_agent() -> SocketAddr {
    agent(|request| async { api_answer(request).await.expect("infallible") }).await
}

async fn tunnel(request: Request<Incoming>) -> Response<Body> {
    let refuse = |status: StatusCode, text: &'static str| {
        let mut response = Response::new(full(text));
        *response.status_mut() = status;
        response
    };
    if request
        .headers()
        .get("x-opendsec-control")
        .is_none_or(|token| token != "secret")
    {
        return refuse(StatusCode::UNAUTHORIZED, "{}");
    }
    let port: u16 = request
        .uri()
        .query()
        .and_then(|query| query.strip_prefix("port=")?.parse().ok())
        .expect("port");
    let Ok(mut target) = TcpStream::connect(("127.0.0.1", port)).await else {
        return refuse(
            StatusCode::BAD_GATEWAY,
            r#"{"code":"port_not_open","message":"closed"}"#,
        );
    };
    tokio::spawn(async move {
        if let Ok(upgraded) = hyper::upgrade::on(request).await {
            drop(tokio::io::copy_bidirectional(&mut TokioIo::new(upgraded), &mut target).await);
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header("connection", "upgrade")
        .header("upgrade", "opendsec-tunnel")
        .body(full(""))
        .expect("response")
}

/// A Connect frame.
pub fn frame(flags: u8, body: &str) -> Vec<u8> {
    let mut frame = vec![flags];
    frame.extend_from_slice(&(body.len() as u32).to_be_bytes());
    frame.extend_from_slice(body.as_bytes());
    frame
}

/// As one HTTP chunk.
pub fn chunked(bytes: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
    chunk.extend_from_slice(bytes);
    chunk.extend_from_slice(b"\r\n");
    chunk
}
