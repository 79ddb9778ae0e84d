// SPDX-License-Identifier: Apache-2.0
//! Structured log lines on standard error.
//!
//! A thread of its own writes them, so a slow reader never stalls the traffic: when its queue is
//! full, lines are dropped and counted. The field names `timestamp`, `level` and `event` are those
//! of the Python daemon's log.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use crate::limits::LOG_QUEUE_LINES;
use crate::metrics::METRICS;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Console,
}

/// Severity of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Level {
    /// Something failed that should not.
    Error,
    /// Something unusual that the edge coped with.
    Warning,
    /// Milestones.
    Info,
    /// Details for finding faults.
    Debug,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

/// A value in a log line.
pub enum Value<'a> {
    /// Text.
    Text(&'a str),
    /// Text made for the line.
    Owned(String),
    /// A count or size.
    Number(u64),
    /// A measure, written with three decimals.
    Decimal(f64),
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(value: &'a str) -> Self {
        Value::Text(value)
    }
}
impl From<String> for Value<'_> {
    fn from(value: String) -> Self {
        Value::Owned(value)
    }
}
impl From<u64> for Value<'_> {
    fn from(value: u64) -> Self {
        Value::Number(value)
    }
}
impl From<f64> for Value<'_> {
    fn from(value: f64) -> Self {
        Value::Decimal(value)
    }
}

enum Message {
    Line(String),
    Flush(SyncSender<()>),
}

struct Logger {
    queue: SyncSender<Message>,
    format: LogFormat,
    level: Level,
}

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Start the writing thread. Later calls change nothing.
pub fn init(format: LogFormat, level: Level) {
    let (queue, lines) = sync_channel(LOG_QUEUE_LINES);
    if LOGGER
        .set(Logger {
            queue,
            format,
            level,
        })
        .is_ok()
    {
        let spawned = std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || write_lines(&lines));
        if let Err(error) = spawned {
            eprintln!("opendsec-edge: cannot start the log thread: {error}");
        }
    }
}

fn write_lines(lines: &Receiver<Message>) {
    while let Ok(message) = lines.recv() {
        match message {
            // Nothing useful can be done when standard error is gone.
            Message::Line(line) => drop(std::io::stderr().write_all(line.as_bytes())),
            Message::Flush(done) => drop(done.send(())),
        }
    }
}

/// Write one line, if `level` is wanted.
pub fn event(level: Level, name: &str, fields: &[(&str, Value<'_>)]) {
    let Some(logger) = LOGGER.get() else { return };
    if level > logger.level {
        return;
    }
    let line = match logger.format {
        LogFormat::Json => json_line(level, name, fields),
        LogFormat::Console => console_line(level, name, fields),
    };
    if logger.queue.try_send(Message::Line(line)).is_err() {
        METRICS.log_lines_dropped.add(1);
    }
}

/// Wait until everything logged so far is written, a second at most.
pub fn flush() {
    let Some(logger) = LOGGER.get() else { return };
    let (done, written) = sync_channel(1);
    if logger.queue.send(Message::Flush(done)).is_ok() {
        // A time-out only means that standard error is stuck; there is no one to tell.
        let _ = written.recv_timeout(Duration::from_secs(1));
    }
}

fn json_text(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

fn json_line(level: Level, name: &str, fields: &[(&str, Value<'_>)]) -> String {
    let time = humantime::format_rfc3339_micros(SystemTime::now());
    let mut line = format!(
        "{{\"timestamp\":\"{time}\",\"level\":\"{}\",\"event\":{}",
        level.name(),
        json_text(name)
    );
    for (key, value) in fields {
        let written = match value {
            Value::Text(text) => write!(line, ",{}:{}", json_text(key), json_text(text)),
            Value::Owned(text) => write!(line, ",{}:{}", json_text(key), json_text(text)),
            Value::Number(number) => write!(line, ",{}:{number}", json_text(key)),
            Value::Decimal(number) => write!(line, ",{}:{number:.3}", json_text(key)),
        };
        debug_assert!(written.is_ok(), "writing to a String cannot fail");
    }
    line.push_str("}\n");
    line
}

fn console_line(level: Level, name: &str, fields: &[(&str, Value<'_>)]) -> String {
    let time = humantime::format_rfc3339_millis(SystemTime::now());
    let mut line = format!("{time} [{:<7}] {name:<28}", level.name());
    for (key, value) in fields {
        let written = match value {
            Value::Text(text) => write!(line, " {key}={text:?}"),
            Value::Owned(text) => write!(line, " {key}={text:?}"),
            Value::Number(number) => write!(line, " {key}={number}"),
            Value::Decimal(number) => write!(line, " {key}={number:.3}"),
        };
        debug_assert!(written.is_ok(), "writing to a String cannot fail");
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_json_line_parses_and_escapes() {
        let line = json_line(
            Level::Info,
            "request",
            &[
                ("path", "/a\"\n".into()),
                ("status", 200u64.into()),
                ("ms", 1.5f64.into()),
            ],
        );
        let value: serde_json::Value = serde_json::from_str(&line).expect("valid JSON");
        assert_eq!(value["event"], "request");
        assert_eq!(value["path"], "/a\"\n");
        assert_eq!(value["status"], 200);
        assert!(line.ends_with("}\n"));
        assert_eq!(line.matches('\n').count(), 1);
    }

    #[test]
    fn a_console_line_stays_one_line() {
        let line = console_line(Level::Warning, "x", &[("path", "/a\nb".into())]);
        assert_eq!(line.matches('\n').count(), 1);
    }
}
