// SPDX-License-Identifier: Apache-2.0
//! `/opendsec/kept`: programs whose outcome is kept until the node has taken it.
//!
//! The node names such a program by a tag of its own. A tag starts a program once: a second start,
//! also one of a request that was delayed on its way, is refused, and a tag that is declared void
//! never starts one. So whoever lost an answer can ask, and knows.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::exit::Exit;
use super::live::Event;
use super::messages::{ProcessConfig, StartRequest};
use super::output::Source;
use super::start::{self, Started};
use crate::agent::{Agent, StreamGuard};
use crate::connect::call::{parse, read_whole};
use crate::connect::json::or_default;
use crate::connect::{Code, RpcError};
use crate::http::body::{Reply, error, json as json_reply, status_only};
use crate::http::query::Query;
use crate::limits::{
    KEPT_BYTES_MAX, KEPT_MAX, KEPT_OUTPUT_BYTES_MAX, KEPT_TAG_BYTES_MAX, KEPT_VOID_MAX,
    KEPT_WAIT_MAX,
};
use crate::sys::pool;
use crate::users::unknown;
use crate::vm;

/// The body of a start.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Order {
    tag: String,
    /// Which agent is meant. A request that was held up on its way must not start anything in one
    /// that was started anew since.
    instance: Option<String>,
    cmd: String,
    #[serde(default, deserialize_with = "or_default")]
    args: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
    user: Option<String>,
    timeout_ms: Option<u64>,
    /// Of each of the two outputs.
    output_bytes: usize,
}

/// The beginning and the end of what was written, and how much it was.
struct Output {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    half: usize,
    bytes: u64,
}

impl Output {
    fn new(most: usize) -> Self {
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            half: most / 2,
            bytes: 0,
        }
    }

    fn push(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
        let room = self.half.saturating_sub(self.head.len()).min(data.len());
        let (first, rest) = data.split_at(room);
        self.head.extend_from_slice(first);
        let rest = &rest[rest.len().saturating_sub(self.half)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.half);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    fn to_json(&self) -> Value {
        let (older, newer) = self.tail.as_slices();
        json!({
            "head": STANDARD.encode(&self.head),
            "tail": STANDARD.encode([older, newer].concat()),
            "bytes": self.bytes,
        })
    }
}

struct Outcome {
    exit: Exit,
    timed_out: bool,
    /// Programs that the kernel of a virtual machine killed for memory meanwhile.
    oom_kills: u64,
}

struct Kept {
    /// None while it is being started.
    pid: Option<u32>,
    /// What its outputs may take together.
    reserved: usize,
    stdout: Output,
    stderr: Output,
    outcome: Option<Outcome>,
    over: watch::Sender<bool>,
}

impl Kept {
    fn to_json(&self, instance: &str) -> Value {
        let mut said = json!({
            "instance": instance,
            "state": match (&self.outcome, self.pid) {
                (Some(_), _) => "ended",
                (None, Some(_)) => "running",
                (None, None) => "starting",
            },
            "pid": self.pid,
            "stdout": self.stdout.to_json(),
            "stderr": self.stderr.to_json(),
        });
        if let Some(outcome) = &self.outcome {
            match outcome.exit {
                Exit::Code(code) => said["exitCode"] = code.into(),
                Exit::Signal { number, .. } => said["signal"] = number.into(),
                Exit::Lost => said["lost"] = true.into(),
            }
            said["timedOut"] = outcome.timed_out.into();
            said["oomKills"] = outcome.oom_kills.into();
        }
        said
    }
}

#[derive(Default)]
struct Entries {
    /// The sandbox that they are of.
    sandbox_id: Option<String>,
    kept: HashMap<String, Kept>,
    /// Tags that start nothing any more, the oldest first.
    void: VecDeque<String>,
}

impl Entries {
    fn avoid(&mut self, tag: String) {
        if self.void.contains(&tag) {
            return;
        }
        if self.void.len() >= KEPT_VOID_MAX {
            self.void.pop_front();
        }
        self.void.push_back(tag);
    }

    fn admit(&mut self, tag: &str, output_bytes: usize) -> Result<(), RpcError> {
        if self.kept.contains_key(tag) || self.void.iter().any(|void| void == tag) {
            let what = format!("tag {tag} was used before");
            return Err(RpcError::new(Code::AlreadyExists, what));
        }
        let reserved = 2 * output_bytes;
        let held: usize = self.kept.values().map(|kept| kept.reserved).sum();
        if self.kept.len() >= KEPT_MAX || held + reserved > KEPT_BYTES_MAX {
            let what = "too many programs whose outcome is kept, or too much of their output";
            return Err(RpcError::exhausted(what));
        }
        self.kept.insert(
            tag.to_owned(),
            Kept {
                pid: None,
                reserved,
                stdout: Output::new(output_bytes),
                stderr: Output::new(output_bytes),
                outcome: None,
                over: watch::Sender::new(false),
            },
        );
        Ok(())
    }
}

/// All of them.
pub struct KeptTable {
    entries: Mutex<Entries>,
    /// Tells this table from that of an agent that was started anew and so knows nothing.
    instance: String,
}

impl Default for KeptTable {
    fn default() -> Self {
        // Seeded by the kernel; it need not be a secret.
        let number = RandomState::new().build_hasher().finish();
        Self {
            entries: Mutex::default(),
            instance: format!("{number:016x}"),
        }
    }
}

impl KeptTable {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes which sandbox this is. Of one that was forked or restored as another, nobody asks for
    /// what the other had started.
    pub fn belong_to(&self, sandbox_id: &str) {
        let mut entries = self.entries();
        if entries.sandbox_id.as_deref() != Some(sandbox_id) {
            entries.sandbox_id = Some(sandbox_id.to_owned());
            entries.kept.clear();
            entries.void.clear();
        }
    }

    fn change(&self, tag: &str, change: impl FnOnce(&mut Kept)) {
        if let Some(kept) = self.entries().kept.get_mut(tag) {
            change(kept);
        }
    }
}

/// Serves the route.
pub async fn serve(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    let query = Query::parse(request.uri().query());
    match *request.method() {
        Method::POST => {
            let starter = Arc::clone(agent);
            // In a task of its own: a caller that goes away now must not leave a half-started
            // program.
            let started = tokio::spawn(async move {
                let body = read_whole(&starter, request.into_body()).await?;
                start(&starter, parse(&body)?).await
            });
            let failed = |err| RpcError::new(Code::Internal, format!("starting failed: {err}"));
            match started.await.map_err(failed).flatten() {
                Ok(said) => json_reply(StatusCode::OK, said.to_string()),
                Err(err) => refusal(&err),
            }
        }
        Method::GET => match tag_of(&query) {
            Some(tag) => json_reply(StatusCode::OK, ask(agent, tag, &query).await.to_string()),
            None => error(StatusCode::BAD_REQUEST, "tag is missing"),
        },
        Method::DELETE => match tag_of(&query) {
            Some(tag) => {
                forget(agent, tag);
                status_only(StatusCode::NO_CONTENT)
            }
            None => error(StatusCode::BAD_REQUEST, "tag is missing"),
        },
        _ => error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed"),
    }
}

fn tag_of(query: &Query) -> Option<&str> {
    query
        .get("tag")
        .filter(|tag| !tag.is_empty() && tag.len() <= KEPT_TAG_BYTES_MAX)
}

fn refusal(err: &RpcError) -> Reply {
    let body = json!({"code": err.code.name(), "message": err.message});
    json_reply(err.code.http_status(), body.to_string())
}

async fn start(agent: &Arc<Agent>, order: Order) -> Result<Value, RpcError> {
    let tag = order.tag.clone();
    if tag.is_empty() || tag.len() > KEPT_TAG_BYTES_MAX {
        return Err(RpcError::invalid("tag is missing or too long"));
    }
    if order.output_bytes > KEPT_OUTPUT_BYTES_MAX {
        return Err(RpcError::invalid("outputBytes is over the limit"));
    }
    if agent.ending.borrow().is_some() {
        return Err(RpcError::new(Code::Unavailable, "the sandbox is ending"));
    }
    let meant = order.instance.as_ref();
    if meant.is_some_and(|instance| *instance != agent.kept.instance) {
        let what = "the agent was started anew since";
        return Err(RpcError::new(Code::FailedPrecondition, what));
    }
    let open = agent.open_stream()?;
    agent.kept.entries().admit(&tag, order.output_bytes)?;
    let begun = begin(agent, order).await;
    match begun {
        Ok(started) => {
            let pid = started.process.pid;
            agent.kept.change(&tag, |kept| kept.pid = Some(pid));
            agent.touch();
            tokio::spawn(keep(Arc::clone(agent), tag, started, open));
            Ok(json!({"instance": agent.kept.instance, "pid": pid}))
        }
        Err(err) => {
            // It did not run. Its tag may be used again, as the caller is told so.
            agent.kept.entries().kept.remove(&tag);
            Err(err)
        }
    }
}

async fn begin(agent: &Arc<Agent>, order: Order) -> Result<Started, RpcError> {
    let named = order.user.or_else(|| agent.settings().default_user.clone());
    let name = named.ok_or_else(|| RpcError::new(Code::Unauthenticated, "no user specified"))?;
    let known = Arc::clone(agent);
    let user = pool::run(move || {
        known.users.snapshot().user(&name).ok_or_else(|| {
            let what = format!("invalid username: {}", unknown(&name));
            RpcError::new(Code::Unauthenticated, what)
        })
    });
    let user = user
        .await
        .map_err(|err| RpcError::from_io("looking up the user", &err))??;
    let deadline = order.timeout_ms.map(Duration::from_millis);
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: order.cmd,
            args: order.args,
            envs: order.envs,
            cwd: order.cwd,
        }),
        pty: None,
        tag: Some(order.tag),
        stdin: Some(false),
    };
    let deadline = deadline.and_then(|limit| Instant::now().checked_add(limit));
    start::start(agent, user, request, deadline).await
}

/// Takes what the program writes, to its end.
async fn keep(agent: Arc<Agent>, tag: String, mut started: Started, _open: StreamGuard) {
    let oom_kills = oom_kills();
    let mut exit = Exit::Lost;
    while let Some(event) = started.events.recv().await {
        match event {
            Event::Output(source, data) => agent.kept.change(&tag, |kept| match source {
                Source::Stderr => kept.stderr.push(&data),
                Source::Stdout | Source::Pty => kept.stdout.push(&data),
            }),
            Event::End(end) => {
                exit = end;
                break;
            }
        }
    }
    let timed_out = started.process.is_timed_out();
    let oom_kills = self::oom_kills().saturating_sub(oom_kills);
    agent.touch();
    agent.kept.change(&tag, |kept| {
        kept.outcome = Some(Outcome {
            exit,
            timed_out,
            oom_kills,
        });
        kept.over.send_replace(true);
    });
}

/// The count of a virtual machine's own kernel; in a container it is the host's, and told as 0.
fn oom_kills() -> u64 {
    if vm::current().is_none() {
        return 0;
    }
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// What became of a program. With `wait_ms`, waits that long for its end. With `void`, a tag that
/// is not known starts nothing any more.
async fn ask(agent: &Agent, tag: &str, query: &Query) -> Value {
    let over = {
        let entries = agent.kept.entries();
        entries.kept.get(tag).map(|kept| kept.over.subscribe())
    };
    if let Some(mut over) = over {
        let wait_ms = query.get("wait_ms").and_then(|text| text.parse().ok());
        let wait = Duration::from_millis(wait_ms.unwrap_or(0)).min(KEPT_WAIT_MAX);
        let ended = async {
            tokio::select! {
                _ = over.wait_for(|over| *over) => {}
                // The sandbox is paused or killed: nobody is to wait for this answer.
                _ = agent.ended() => {}
            }
        };
        let _ = timeout(wait, ended).await;
    }
    let instance = &agent.kept.instance;
    let mut entries = agent.kept.entries();
    if let Some(kept) = entries.kept.get(tag) {
        return kept.to_json(instance);
    }
    if entries.void.iter().any(|void| void == tag) {
        return json!({"instance": instance, "state": "void"});
    }
    if query.get("void").is_some() {
        entries.avoid(tag.to_owned());
    }
    json!({"instance": instance, "state": "missing"})
}

/// Drops the outcome of a program that has ended. Its tag stays used.
fn forget(agent: &Agent, tag: &str) {
    let mut entries = agent.kept.entries();
    let ended = entries
        .kept
        .get(tag)
        .is_some_and(|kept| kept.outcome.is_some());
    if ended {
        entries.kept.remove(tag);
        entries.avoid(tag.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_and_the_end_of_output_are_kept() {
        let mut output = Output::new(8);
        output.push(b"abc");
        output.push(b"defg");
        assert_eq!(output.head, b"abcd");
        assert_eq!(output.tail, b"efg");
        output.push(b"hijklmnop");
        output.push(b"q");
        assert_eq!(output.head, b"abcd");
        assert_eq!(output.tail, b"nopq");
        assert_eq!(output.bytes, 17);
        let mut nothing = Output::new(0);
        nothing.push(b"abc");
        assert_eq!(
            (nothing.head.len(), nothing.tail.len(), nothing.bytes),
            (0, 0, 3)
        );
    }

    #[test]
    fn a_tag_is_used_once() {
        let mut entries = Entries::default();
        entries.admit("a", 8).unwrap();
        assert_eq!(entries.admit("a", 8).unwrap_err().code, Code::AlreadyExists);
        entries.avoid("b".into());
        entries.avoid("b".into());
        assert_eq!(entries.void.len(), 1);
        assert_eq!(entries.admit("b", 8).unwrap_err().code, Code::AlreadyExists);
        let most = KEPT_BYTES_MAX / 2;
        assert_eq!(
            entries.admit("c", most).unwrap_err().code,
            Code::ResourceExhausted
        );
    }
}
