// SPDX-License-Identifier: Apache-2.0
//! The answering streams of `Start` and `Connect`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::exit::Exit;
use super::live::{Event, Process};
use super::output::Source;
use crate::agent::Agent;
use crate::connect::json::encode_bytes;
use crate::connect::stream::{Gone, StreamOut};
use crate::connect::{Code, RpcError};

const KEEPALIVE: &str = r#"{"event":{"keepalive":{}}}"#;
/// Longest possible prefix and suffix of a data event.
const DATA_FRAME_EXTRA_BYTES: usize = 64;

/// What a stream needs beside its process.
pub struct Terms {
    /// Time between keepalives of a silent stream.
    pub keepalive: Duration,
    /// When the stream ends, whatever the process does.
    pub deadline: Option<Instant>,
    /// Whether the deadline is also the process's own.
    pub owns_process: bool,
}

/// Sends the start and then all events of a process until its end.
///
/// Errors: those that the stream ends with.
pub async fn follow(
    agent: Arc<Agent>,
    process: Arc<Process>,
    mut events: mpsc::Receiver<Event>,
    out: Arc<StreamOut>,
    terms: Terms,
) -> Result<(), RpcError> {
    send_start(&out, process.pid)
        .await
        .map_err(|Gone| stalled())?;
    let mut silence_ends = Instant::now() + terms.keepalive;
    loop {
        let sent = tokio::select! {
            biased;
            // Ended by the control plane: even a process with much to say stops here.
            error = agent.ended() => return Err(error),
            () = until(terms.deadline) => return Err(over()),
            event = events.recv() => match event {
                None => return Err(stalled()),
                Some(Event::Output(source, data)) => send_data(&out, source, &data).await,
                Some(Event::End(_)) if terms.owns_process && process.is_timed_out() => {
                    return Err(over());
                }
                Some(Event::End(exit)) => {
                    return send_end(&out, &exit).await.map_err(|Gone| stalled());
                }
            },
            () = sleep_until(silence_ends) => out.send(KEEPALIVE.as_bytes()).await,
            () = out.closed() => Err(Gone),
        };
        // Either nobody reads the error, or it says why the stream is cut.
        sent.map_err(|Gone| stalled())?;
        silence_ends = Instant::now() + terms.keepalive;
    }
}

/// Sends start and end of a process that has ended already.
pub async fn replay(out: Arc<StreamOut>, pid: u32, exit: Exit) -> Result<(), RpcError> {
    send_start(&out, pid).await.map_err(|Gone| stalled())?;
    send_end(&out, &exit).await.map_err(|Gone| stalled())
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn over() -> RpcError {
    RpcError::new(
        Code::DeadlineExceeded,
        "the time given for the command is over",
    )
}

fn stalled() -> RpcError {
    RpcError::exhausted("the client took no output for too long, connect again to go on")
}

async fn send_start(out: &StreamOut, pid: u32) -> Result<(), Gone> {
    out.send(format!(r#"{{"event":{{"start":{{"pid":{pid}}}}}}}"#).as_bytes())
        .await
}

async fn send_end(out: &StreamOut, exit: &Exit) -> Result<(), Gone> {
    let event = serde_json::json!({"event": {"end": exit.to_json()}});
    out.send(event.to_string().as_bytes()).await
}

async fn send_data(out: &StreamOut, source: Source, data: &[u8]) -> Result<(), Gone> {
    let mut json = String::with_capacity(data.len() / 3 * 4 + DATA_FRAME_EXTRA_BYTES);
    json.push_str(r#"{"event":{"data":{""#);
    json.push_str(source.field());
    json.push_str(r#"":""#);
    encode_bytes(data, &mut json);
    json.push_str(r#""}}}"#);
    out.send(json.as_bytes()).await
}
