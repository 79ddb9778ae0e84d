// SPDX-License-Identifier: Apache-2.0
//! `process.Process`: the calls.

use std::sync::Arc;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::messages::{Input, ProcessConfig, ProcessRequest, StartRequest, StreamInputRequest};
use super::streams::{self, Terms};
use super::{live::Process, start, tree};
use crate::agent::{Agent, caller};
use crate::connect::call::{self, Shape};
use crate::connect::frame::{Decoder, Frame};
use crate::connect::{Code, RpcError, stream};
use crate::http::body::{Reply, error};

const EMPTY: &str = "{}";

/// Serves a call of the service.
pub async fn route(agent: &Arc<Agent>, method: &str, request: Request<Incoming>) -> Reply {
    match method {
        "Start" => start_stream(agent, request).await,
        "Connect" => connect_stream(agent, request).await,
        "StreamInput" => stream_input(agent, request).await,
        "List" => call::unary(agent, request, |_, _: Value| async { Ok(list(agent)) }).await,
        "Update" => call::unary(agent, request, |_, m| update(agent, m)).await,
        "SendInput" => call::unary(agent, request, |_, m| send_input(agent, m)).await,
        "SendSignal" => call::unary(agent, request, |_, m| send_signal(agent, m)).await,
        "CloseStdin" => call::unary(agent, request, |_, m| close_stdin(agent, m)).await,
        _ => error(
            StatusCode::NOT_FOUND,
            format!("process.Process has no method '{method}'"),
        ),
    }
}

async fn start_stream(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    if let Some(refusal) = call::refuse(&request, Shape::Stream) {
        return refusal;
    }
    let starter = Arc::clone(agent);
    let begun = async move {
        let agent = &starter;
        let (head, body) = request.into_parts();
        let deadline = call::timeout(&head.headers)?.map(|limit| Instant::now() + limit);
        let message: StartRequest = call::stream_message(agent, body).await?;
        let keepalive = call::keepalive(&head.headers);
        let user = caller(agent, head.headers).await?;
        let started = start::start(agent, user, message, deadline).await?;
        Ok((
            started,
            Terms {
                keepalive,
                deadline,
                owns_process: true,
            },
        ))
    };
    // In a task of its own: a client that goes away now must not leave a half-started program.
    let begun = tokio::spawn(begun).await;
    let failed = |err| {
        Err(RpcError::new(
            Code::Internal,
            format!("starting failed: {err}"),
        ))
    };
    match begun.unwrap_or_else(failed) {
        Err(err) => stream::respond_once(Err(&err)),
        Ok((started, terms)) => stream::respond(agent, |out| {
            let agent = Arc::clone(agent);
            streams::follow(agent, started.process, started.events, out, terms)
        }),
    }
}

async fn connect_stream(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    if let Some(refusal) = call::refuse(&request, Shape::Stream) {
        return refusal;
    }
    let begun = async {
        let (head, body) = request.into_parts();
        let deadline = call::timeout(&head.headers)?.map(|limit| Instant::now() + limit);
        let keepalive = call::keepalive(&head.headers);
        let message: ProcessRequest = call::stream_message(agent, body).await?;
        let name = message.process.name()?;
        Ok((
            name,
            Terms {
                keepalive,
                deadline,
                owns_process: false,
            },
        ))
    };
    let (name, terms) = match begun.await {
        Ok(begun) => begun,
        Err(err) => return stream::respond_once(Err(&err)),
    };
    match agent.processes.find(&name) {
        Ok(process) => stream::respond(agent, |out| {
            let events = process.listen();
            streams::follow(Arc::clone(agent), process, events, out, terms)
        }),
        Err(missing) => match agent.processes.find_ended(&name) {
            Some(ended) => {
                stream::respond(agent, |out| streams::replay(out, ended.pid, ended.exit))
            }
            None => stream::respond_once(Err(&missing)),
        },
    }
}

/// A client stream: each message is written before the next is read, so a slow program holds the
/// client back.
async fn stream_input(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    if let Some(refusal) = call::refuse(&request, Shape::Stream) {
        return refusal;
    }
    let (head, body) = request.into_parts();
    let work = take_input(agent, body);
    let outcome = match call::timeout(&head.headers) {
        Err(err) => Err(err),
        Ok(None) => work.await,
        Ok(Some(limit)) => timeout_at(Instant::now() + limit, work)
            .await
            .unwrap_or_else(|_| {
                Err(RpcError::new(
                    Code::DeadlineExceeded,
                    "the time given for the call is over",
                ))
            }),
    };
    stream::respond_once(outcome.as_ref().map(|()| EMPTY.as_bytes()))
}

async fn take_input(agent: &Arc<Agent>, mut body: Incoming) -> Result<(), RpcError> {
    let _open = agent.open_stream()?;
    let mut decoder = Decoder::default();
    let mut process: Option<Arc<Process>> = None;
    loop {
        while let Some(frame) = decoder.next_frame()? {
            let Frame::Message(message) = frame else {
                return Ok(());
            };
            let message: StreamInputRequest = call::parse(&message)?;
            agent.touch();
            if let Some(start) = message.start {
                process = Some(agent.processes.find(&start.process.name()?)?);
            } else if let Some(data) = message.data {
                let process = process
                    .as_ref()
                    .ok_or_else(|| RpcError::invalid("the first message must name the process"))?;
                process.give(data.input).await?;
            } else if message.keepalive.is_none() {
                return Err(RpcError::new(
                    Code::Unimplemented,
                    "unknown kind of message",
                ));
            }
        }
        match body.frame().await {
            None if decoder.is_partial() => {
                return Err(RpcError::invalid("the stream broke off within a message"));
            }
            None => return Ok(()),
            Some(Err(err)) => return Err(RpcError::invalid(format!("request body: {err}"))),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    decoder.push(&data);
                }
            }
        }
    }
}

fn list(agent: &Agent) -> String {
    let describe = |process: Arc<Process>| {
        let config: &ProcessConfig = &process.config;
        let mut info = json!({"config": config, "pid": process.pid});
        if let Some(tag) = &process.tag {
            info["tag"] = tag.as_str().into();
        }
        info
    };
    let processes: Vec<Value> = agent.processes.list().into_iter().map(describe).collect();
    json!({"processes": processes}).to_string()
}

async fn update(agent: &Arc<Agent>, message: ProcessRequest) -> Result<String, RpcError> {
    let process = agent.processes.find(&message.process.name()?)?;
    if let Some(size) = message.pty.and_then(|pty| pty.size) {
        process.resize(size)?;
    }
    Ok(EMPTY.to_owned())
}

async fn send_input(agent: &Arc<Agent>, message: ProcessRequest) -> Result<String, RpcError> {
    let process = agent.processes.find(&message.process.name()?)?;
    let input: Input = message.input.unwrap_or_default();
    process.give(input).await?;
    Ok(EMPTY.to_owned())
}

/// SIGKILL ends the whole tree: a killed shell cannot end its children itself. Every other signal
/// goes to the program alone, which then decides.
async fn send_signal(agent: &Arc<Agent>, message: ProcessRequest) -> Result<String, RpcError> {
    let process = agent.processes.find(&message.process.name()?)?;
    let signal = message.signal.map_or(Ok(0), |signal| signal.number())?;
    match signal {
        0 => return Err(RpcError::invalid("signal is missing")),
        libc::SIGKILL => tree::kill(agent, &process).await,
        signal => process.signal(signal)?,
    }
    Ok(EMPTY.to_owned())
}

async fn close_stdin(agent: &Arc<Agent>, message: ProcessRequest) -> Result<String, RpcError> {
    let process = agent.processes.find(&message.process.name()?)?;
    process.close_input().await?;
    Ok(EMPTY.to_owned())
}
