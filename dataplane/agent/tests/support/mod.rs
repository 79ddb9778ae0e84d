// SPDX-License-Identifier: Apache-2.0
//! An agent as a normal process on loopback, and a plain client for it.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

pub const ACCESS: &str = "access-token";
pub const CONTROL: &str = "control-token-0123456789";
/// Nothing here takes long; a hang must not hang the tests.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
static COUNTER: AtomicU32 = AtomicU32::new(0);

pub struct Agent {
    child: Child,
    pub address: SocketAddr,
    pub dir: PathBuf,
}

pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    /// The frames of a stream: messages, and the content of the last frame.
    pub fn frames(&self) -> (Vec<Value>, Value) {
        let mut rest = &self.body[..];
        let mut messages = Vec::new();
        while rest.len() >= 5 {
            let length = u32::from_be_bytes(rest[1..5].try_into().unwrap()) as usize;
            let message = serde_json::from_slice(&rest[5..5 + length]).expect("a JSON message");
            if rest[0] & 2 != 0 {
                assert_eq!(rest.len(), 5 + length, "nothing follows the end");
                return (messages, message);
            }
            messages.push(message);
            rest = &rest[5 + length..];
        }
        panic!("the stream has no end frame");
    }
}

/// What a command gave.
pub struct Outcome {
    pub pid: u64,
    pub stdout: String,
    pub stderr: String,
    pub pty: String,
    pub end: Value,
    pub error: Value,
}

impl Agent {
    /// Starts an agent that waits for its `/init`.
    pub fn start_bare() -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_opendsec-agent"))
            .args(["--listen", "127.0.0.1:0"])
            .stderr(Stdio::piped())
            .spawn()
            .expect("the agent starts");
        Self::of_child(child)
    }

    /// Takes an agent that has been started with a pipe for its standard error.
    pub fn of_child(mut child: Child) -> Self {
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line
            .trim()
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .expect("an address");
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("opendsec-agent-it-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        Self {
            child,
            address,
            dir,
        }
    }

    /// Starts an agent and sets it up for the user of the tests.
    pub fn start() -> Self {
        let agent = Self::start_bare();
        let init = json!({
            "accessToken": ACCESS, "controlToken": CONTROL, "defaultUser": own_user(),
            "envVars": {"GLOBAL": "g", "BOTH": "g"}, "sandboxId": "itest", "templateId": "base",
            "limits": {"cpuCount": 2.0, "memoryBytes": 1 << 30, "diskBytes": 1i64 << 31},
        });
        let answer = agent.send("POST", "/init", &[], init.to_string().as_bytes());
        assert_eq!(answer.status, 204);
        agent
    }

    /// Ends it and waits for that.
    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    /// Sends the head of a request, with the access token.
    pub fn open(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> TcpStream {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        stream
    }

    /// One request without any token.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let length = body.len().to_string();
        let mut all = headers.to_vec();
        all.extend([("Connection", "close"), ("Content-Length", length.as_str())]);
        let mut stream = self.open(method, path, &all);
        stream.write_all(body).unwrap();
        read_answer(stream)
    }

    /// One request with the access token.
    pub fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut all = headers.to_vec();
        all.push(("X-Access-Token", ACCESS));
        self.send(method, path, &all, body)
    }

    pub fn control(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        self.send(method, path, &[("X-Opendsec-Control", CONTROL)], body)
    }

    pub fn upload(&self, name: &str, headers: &[(&str, &str)], content: &[u8]) -> Answer {
        let mut all = vec![("Content-Type", "application/octet-stream")];
        all.extend_from_slice(headers);
        self.call(
            "POST",
            &format!("/files?path={}", self.path(name)),
            &all,
            content,
        )
    }

    pub fn unary(&self, method: &str, message: Value) -> (u16, Value) {
        let headers = [
            ("Content-Type", "application/json"),
            ("Content-Encoding", "identity"),
        ];
        let answer = self.call(
            "POST",
            &format!("/{method}"),
            &headers,
            message.to_string().as_bytes(),
        );
        (answer.status, answer.json())
    }

    pub fn stream(&self, method: &str, headers: &[(&str, &str)], message: Value) -> Answer {
        let mut all = vec![("Content-Type", "application/connect+json")];
        all.extend_from_slice(headers);
        self.call("POST", &format!("/{method}"), &all, &frame(&message))
    }

    /// Opens a stream and leaves it open.
    pub fn open_stream(&self, method: &str, headers: &[(&str, &str)], message: Value) -> Stream {
        let body = frame(&message);
        let length = body.len().to_string();
        let mut all = vec![
            ("Content-Type", "application/connect+json"),
            ("X-Access-Token", ACCESS),
            ("Content-Length", length.as_str()),
        ];
        all.extend_from_slice(headers);
        let mut stream = self.open("POST", &format!("/{method}"), &all);
        stream.write_all(&body).unwrap();
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            reader.read_line(&mut line).unwrap();
        }
        Stream {
            reader,
            held: Vec::new(),
        }
    }

    /// Runs a shell command to its end.
    pub fn run(&self, command: &str, headers: &[(&str, &str)]) -> Outcome {
        let message =
            json!({"process": {"cmd": "/bin/sh", "args": ["-c", command]}, "stdin": false});
        outcome(&self.stream("process.Process/Start", headers, message))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The messages of a stream, one by one.
pub struct Stream {
    reader: BufReader<TcpStream>,
    held: Vec<u8>,
}

impl Stream {
    /// The next frame: its flags and content.
    pub fn next(&mut self) -> (u8, Value) {
        self.fill(5);
        let length = u32::from_be_bytes(self.held[1..5].try_into().unwrap()) as usize;
        self.fill(5 + length);
        let flags = self.held[0];
        let message = serde_json::from_slice(&self.held[5..5 + length]).unwrap();
        self.held.drain(..5 + length);
        (flags, message)
    }

    fn fill(&mut self, count: usize) {
        while self.held.len() < count {
            let mut line = String::new();
            self.reader.read_line(&mut line).unwrap();
            let size = usize::from_str_radix(line.trim(), 16).expect("a chunk size");
            assert!(size > 0, "the stream ended early");
            let mut chunk = vec![0; size + 2];
            self.reader.read_exact(&mut chunk).unwrap();
            self.held.extend_from_slice(&chunk[..size]);
        }
    }
}

/// The user that runs the tests.
pub fn own_user() -> String {
    let uid = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap());
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let line = passwd
        .lines()
        .find(|line| line.split(':').nth(2) == Some(&uid.to_string()));
    line.and_then(|line| line.split(':').next())
        .expect("a user name")
        .to_owned()
}

/// What `Authorization` says for a user.
pub fn basic(user: &str) -> String {
    use base64::Engine;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
    format!("Basic {encoded}")
}

pub fn frame(message: &Value) -> Vec<u8> {
    let json = message.to_string();
    let mut out = vec![0];
    out.extend_from_slice(&u32::try_from(json.len()).unwrap().to_be_bytes());
    out.extend_from_slice(json.as_bytes());
    out
}

pub fn decode(text: &Value) -> Vec<u8> {
    use base64::Engine;
    let text = text.as_str().unwrap_or_default();
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .unwrap()
}

pub fn encode(data: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(data)
}

pub fn outcome(answer: &Answer) -> Outcome {
    let (messages, last) = answer.frames();
    let mut found = Outcome {
        pid: 0,
        stdout: String::new(),
        stderr: String::new(),
        pty: String::new(),
        end: Value::Null,
        error: last["error"].clone(),
    };
    for message in &messages {
        let event = &message["event"];
        if let Some(pid) = event["start"]["pid"].as_u64() {
            found.pid = pid;
        }
        let text =
            |field: &str| String::from_utf8_lossy(&decode(&event["data"][field])).into_owned();
        found.stdout += &text("stdout");
        found.stderr += &text("stderr");
        found.pty += &text("pty");
        if event.get("end").is_some() {
            found.end = event["end"].clone();
        }
    }
    found
}

pub fn read_answer(mut stream: TcpStream) -> Answer {
    let mut raw = Vec::new();
    stream.read_to_end(&mut raw).unwrap();
    let split = raw
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .expect("a head");
    let head = String::from_utf8_lossy(&raw[..split]).into_owned();
    let mut lines = head.lines();
    let status = lines
        .next()
        .unwrap()
        .split(' ')
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let body = raw[split + 4..].to_vec();
    let chunked = headers.iter().any(|(name, _)| name == "transfer-encoding");
    Answer {
        status,
        headers,
        body: if chunked { unchunk(&body) } else { body },
    }
}

fn unchunk(mut raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(end) = raw.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&raw[..end]).unwrap(), 16).unwrap();
        raw = &raw[end + 2..];
        if size == 0 {
            break;
        }
        out.extend_from_slice(&raw[..size]);
        raw = &raw[size + 2..];
    }
    out
}

/// Asks until `check` says yes; the number of tries is bounded.
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    for _ in 0..500 {
        if check() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("never: {what}");
}

pub fn exists(path: &str) -> bool {
    Path::new(path).exists()
}
