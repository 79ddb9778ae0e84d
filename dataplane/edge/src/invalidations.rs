// SPDX-License-Identifier: Apache-2.0
//! Keeps the one stream over which the control plane says which routes are no longer true.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::time::timeout;

use crate::cache::RouteCache;
use crate::limits::{
    INVALIDATION_LINE_BYTES_MAX, INVALIDATION_RETRY_MAX, INVALIDATION_RETRY_MIN,
    INVALIDATION_SILENCE,
};
use crate::log::{Level, event};
use crate::metrics::METRICS;

#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Notice {
    Hello,
    Invalidate {
        sandbox_id: String,
    },
    InvalidateAll,
    /// Pings, and whatever a newer control plane may add.
    #[serde(other)]
    Other,
}

/// Follow the stream for ever, opening it again whenever it breaks.
pub async fn follow(cache: Arc<RouteCache>) {
    let mut pause = INVALIDATION_RETRY_MIN;
    let mut reported = false;
    loop {
        let mut connected = false;
        let why = follow_once(&cache, &mut connected).await;
        METRICS.control_connected.set(0);
        if connected {
            pause = INVALIDATION_RETRY_MIN;
            reported = false;
        }
        // One line for each outage, not for each attempt.
        if !reported {
            event(
                Level::Warning,
                "control_stream_lost",
                &[("error", why.into())],
            );
            reported = true;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(INVALIDATION_RETRY_MAX);
    }
}

/// Follow one stream to its end; says why it ended.
async fn follow_once(cache: &Arc<RouteCache>, connected: &mut bool) -> String {
    let opened = timeout(
        INVALIDATION_SILENCE,
        cache.control().get("/invalidations", None),
    )
    .await;
    let mut body = match opened {
        Ok(Ok(response)) if response.status() == http::StatusCode::OK => response.into_body(),
        Ok(Ok(response)) => return format!("the control plane answered {}", response.status()),
        Ok(Err(error)) => return error,
        Err(_) => return silence(INVALIDATION_SILENCE),
    };
    let mut buffer = BytesMut::new();
    loop {
        let data = match timeout(INVALIDATION_SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            Ok(Some(Err(error))) => return error.to_string(),
            Ok(None) => return "the control plane ended the stream".to_owned(),
            Err(_) => return silence(INVALIDATION_SILENCE),
        };
        buffer.extend_from_slice(&data);
        while let Some(end) = buffer.iter().position(|&byte| byte == b'\n') {
            let line = buffer.split_to(end);
            buffer.advance(1);
            if let Err(why) = obey(cache, &line, connected) {
                return why;
            }
        }
        if buffer.len() > INVALIDATION_LINE_BYTES_MAX {
            return "a line of the stream is too long".to_owned();
        }
    }
}

fn silence(limit: Duration) -> String {
    format!("no sign of life for {} s", limit.as_secs())
}

fn obey(cache: &Arc<RouteCache>, line: &[u8], connected: &mut bool) -> Result<(), String> {
    if line.trim_ascii().is_empty() {
        return Ok(());
    }
    let notice =
        serde_json::from_slice(line).map_err(|error| format!("unreadable line: {error}"))?;
    match notice {
        Notice::Hello => {
            // Whatever was missed while the stream was down is covered by asking afresh.
            cache.invalidate_all();
            *connected = true;
            METRICS.control_connected.set(1);
            event(Level::Info, "control_stream_open", &[]);
        }
        Notice::Invalidate { sandbox_id } => cache.invalidate(&sandbox_id),
        Notice::InvalidateAll => cache.invalidate_all(),
        Notice::Other => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices() {
        let parse = |line: &str| serde_json::from_str::<Notice>(line).expect("notice");
        assert_eq!(parse(r#"{"event":"hello"}"#), Notice::Hello);
        assert_eq!(parse(r#"{"event":"ping"}"#), Notice::Other);
        assert_eq!(
            parse(r#"{"event":"invalidate_all"}"#),
            Notice::InvalidateAll
        );
        let one = parse(r#"{"event":"invalidate","sandbox_id":"i1"}"#);
        assert_eq!(
            one,
            Notice::Invalidate {
                sandbox_id: "i1".to_owned()
            }
        );
    }
}
