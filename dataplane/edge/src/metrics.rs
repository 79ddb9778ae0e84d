// SPDX-License-Identifier: Apache-2.0
//! Counters of the whole process, and their text for Prometheus.
//!
//! Labels are small closed sets: never a sandbox, path or client address.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A number that only grows, or goes up and down when used as a gauge.
#[derive(Debug)]
pub struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Self {
        Counter(AtomicU64::new(0))
    }

    /// Add `amount`.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Take `amount` away (gauges).
    pub fn sub(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Replace the value (gauges).
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The present value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The API, over its Unix socket.
    Api,
    /// A sandbox's agent.
    Agent,
    /// A port that a program in a sandbox listens on.
    Port,
    /// Refused before it had a destination.
    Refused,
}

const CLASSES: [Class; 4] = [Class::Api, Class::Agent, Class::Port, Class::Refused];

impl Class {
    /// The label's value.
    pub fn name(self) -> &'static str {
        match self {
            Class::Api => "api",
            Class::Agent => "agent",
            Class::Port => "port",
            Class::Refused => "refused",
        }
    }
}

/// How talking to an upstream failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamFailure {
    /// No connection could be made.
    Connect,
    /// Nothing listens on the port in the sandbox.
    PortClosed,
    /// The connection ended before the answer's head.
    NoAnswer,
    /// The connection ended within the answer.
    Truncated,
    /// The control plane did not answer a route request.
    Control,
}

const FAILURES: [UpstreamFailure; 5] = [
    UpstreamFailure::Connect,
    UpstreamFailure::PortClosed,
    UpstreamFailure::NoAnswer,
    UpstreamFailure::Truncated,
    UpstreamFailure::Control,
];

impl UpstreamFailure {
    fn name(self) -> &'static str {
        match self {
            UpstreamFailure::Connect => "connect",
            UpstreamFailure::PortClosed => "port_closed",
            UpstreamFailure::NoAnswer => "no_answer",
            UpstreamFailure::Truncated => "truncated",
            UpstreamFailure::Control => "control",
        }
    }
}

/// Upper bounds of the answer-time histogram, in seconds.
const BUCKETS_S: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0];
/// Response status classes: 1xx to 5xx.
const STATUS_CLASSES: usize = 5;

struct Histogram {
    buckets: [AtomicU64; BUCKETS_S.len()],
    count: AtomicU64,
    sum_us: AtomicU64,
}

impl Histogram {
    const fn new() -> Self {
        Histogram {
            buckets: [const { AtomicU64::new(0) }; BUCKETS_S.len()],
            count: AtomicU64::new(0),
            sum_us: AtomicU64::new(0),
        }
    }

    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(index) = BUCKETS_S.iter().position(|&bound| seconds <= bound) {
            self.buckets[index].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.sum_us.fetch_add(micros, Ordering::Relaxed);
    }
}

/// All counters.
pub struct Metrics {
    requests: [[AtomicU64; STATUS_CLASSES]; CLASSES.len()],
    bytes_in: [AtomicU64; CLASSES.len()],
    bytes_out: [AtomicU64; CLASSES.len()],
    answer_time: [Histogram; CLASSES.len()],
    upstream_failures: [AtomicU64; FAILURES.len()],
    /// Client connections open now.
    pub client_connections: Counter,
    /// Client connections taken in since the start.
    pub client_connections_accepted: Counter,
    /// Client connections refused because the cap was reached.
    pub client_connections_refused: Counter,
    /// TLS handshakes that failed.
    pub tls_failures: Counter,
    /// Connections to sandboxes and the API open now.
    pub upstream_connections: Counter,
    /// Upgraded connections (WebSocket and others) open now.
    pub upgraded_connections: Counter,
    /// Requests repeated because a kept connection had gone stale.
    pub stale_retries: Counter,
    /// Routes found in the cache.
    pub route_hits: Counter,
    /// Routes asked for.
    pub route_misses: Counter,
    /// Routes in the cache now.
    pub routes_cached: Counter,
    /// Invalidations received.
    pub invalidations: Counter,
    /// 1 while the invalidation stream stands.
    pub control_connected: Counter,
    /// Log lines dropped because standard error was slow.
    pub log_lines_dropped: Counter,
}

/// The process's counters.
pub static METRICS: Metrics = Metrics::new();

impl Metrics {
    const fn new() -> Self {
        Metrics {
            requests: [const { [const { AtomicU64::new(0) }; STATUS_CLASSES] }; CLASSES.len()],
            bytes_in: [const { AtomicU64::new(0) }; CLASSES.len()],
            bytes_out: [const { AtomicU64::new(0) }; CLASSES.len()],
            answer_time: [const { Histogram::new() }; CLASSES.len()],
            upstream_failures: [const { AtomicU64::new(0) }; FAILURES.len()],
            client_connections: Counter::new(),
            client_connections_accepted: Counter::new(),
            client_connections_refused: Counter::new(),
            tls_failures: Counter::new(),
            upstream_connections: Counter::new(),
            upgraded_connections: Counter::new(),
            stale_retries: Counter::new(),
            route_hits: Counter::new(),
            route_misses: Counter::new(),
            routes_cached: Counter::new(),
            invalidations: Counter::new(),
            control_connected: Counter::new(),
            log_lines_dropped: Counter::new(),
        }
    }

    /// Count a finished request.
    pub fn request_done(&self, class: Class, status: u16, bytes_in: u64, bytes_out: u64) {
        let status_class = usize::from(status / 100).clamp(1, STATUS_CLASSES) - 1;
        self.requests[class as usize][status_class].fetch_add(1, Ordering::Relaxed);
        self.bytes_in[class as usize].fetch_add(bytes_in, Ordering::Relaxed);
        self.bytes_out[class as usize].fetch_add(bytes_out, Ordering::Relaxed);
    }

    /// Note the time from a request's head to its answer's head.
    pub fn answered(&self, class: Class, time: Duration) {
        self.answer_time[class as usize].observe(time);
    }

    /// Count a failure of an upstream.
    pub fn upstream_failed(&self, failure: UpstreamFailure) {
        self.upstream_failures[failure as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Everything in Prometheus' text format, version 0.0.4.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(8 * 1024);
        self.render_requests(&mut out);
        self.render_answer_time(&mut out);
        self.render_singles(&mut out);
        out
    }

    fn render_requests(&self, out: &mut String) {
        head(
            out,
            "requests_total",
            "counter",
            "Requests finished, by destination and status class.",
        );
        for class in CLASSES {
            for (index, count) in self.requests[class as usize].iter().enumerate() {
                let labels = format!("class=\"{}\",status=\"{}xx\"", class.name(), index + 1);
                sample(out, "requests_total", &labels, load(count));
            }
        }
        head(
            out,
            "bytes_total",
            "counter",
            "Body bytes, by destination and direction.",
        );
        for class in CLASSES {
            for (direction, bytes) in [("in", &self.bytes_in), ("out", &self.bytes_out)] {
                let labels = format!("class=\"{}\",direction=\"{direction}\"", class.name());
                sample(out, "bytes_total", &labels, load(&bytes[class as usize]));
            }
        }
        head(
            out,
            "upstream_errors_total",
            "counter",
            "Failures of sandboxes, API or control plane.",
        );
        for failure in FAILURES {
            let labels = format!("kind=\"{}\"", failure.name());
            sample(
                out,
                "upstream_errors_total",
                &labels,
                load(&self.upstream_failures[failure as usize]),
            );
        }
    }

    fn render_answer_time(&self, out: &mut String) {
        let name = "answer_seconds";
        head(
            out,
            name,
            "histogram",
            "Time from a request's head to its answer's head.",
        );
        for class in CLASSES {
            let histogram = &self.answer_time[class as usize];
            let class = class.name();
            let mut below = 0;
            for (bound, bucket) in BUCKETS_S.iter().zip(&histogram.buckets) {
                below += load(bucket);
                sample(
                    out,
                    &format!("{name}_bucket"),
                    &format!("class=\"{class}\",le=\"{bound}\""),
                    below,
                );
            }
            let count = load(&histogram.count);
            sample(
                out,
                &format!("{name}_bucket"),
                &format!("class=\"{class}\",le=\"+Inf\""),
                count,
            );
            sample(
                out,
                &format!("{name}_count"),
                &format!("class=\"{class}\""),
                count,
            );
            let sum_s = load(&histogram.sum_us) as f64 / 1e6;
            push(
                out,
                format_args!("opendsec_edge_{name}_sum{{class=\"{class}\"}} {sum_s}\n"),
            );
        }
    }

    fn render_singles(&self, out: &mut String) {
        let singles: [(&str, &str, &str, &Counter); 14] = [
            (
                "client_connections",
                "gauge",
                "Client connections open.",
                &self.client_connections,
            ),
            (
                "client_connections_accepted_total",
                "counter",
                "Client connections taken in.",
                &self.client_connections_accepted,
            ),
            (
                "client_connections_refused_total",
                "counter",
                "Client connections refused at the cap.",
                &self.client_connections_refused,
            ),
            (
                "tls_failures_total",
                "counter",
                "TLS handshakes that failed.",
                &self.tls_failures,
            ),
            (
                "upstream_connections",
                "gauge",
                "Connections to sandboxes and the API.",
                &self.upstream_connections,
            ),
            (
                "upgraded_connections",
                "gauge",
                "Upgraded connections open.",
                &self.upgraded_connections,
            ),
            (
                "stale_retries_total",
                "counter",
                "Requests repeated after a stale kept connection.",
                &self.stale_retries,
            ),
            (
                "route_cache_hits_total",
                "counter",
                "Routes found in the cache.",
                &self.route_hits,
            ),
            (
                "route_cache_misses_total",
                "counter",
                "Routes asked from the control plane.",
                &self.route_misses,
            ),
            (
                "routes_cached",
                "gauge",
                "Routes in the cache.",
                &self.routes_cached,
            ),
            (
                "invalidations_total",
                "counter",
                "Route invalidations received.",
                &self.invalidations,
            ),
            (
                "control_connected",
                "gauge",
                "1 while the invalidation stream stands.",
                &self.control_connected,
            ),
            (
                "log_lines_dropped_total",
                "counter",
                "Log lines lost to a slow reader.",
                &self.log_lines_dropped,
            ),
            (
                "resident_memory_bytes",
                "gauge",
                "Resident memory of the edge.",
                &resident_bytes(),
            ),
        ];
        for (name, kind, help, counter) in singles {
            head(out, name, kind, help);
            push(
                out,
                format_args!("opendsec_edge_{name} {}\n", counter.get()),
            );
        }
    }
}

fn load(value: &AtomicU64) -> u64 {
    value.load(Ordering::Relaxed)
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let written = out.write_fmt(text);
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    push(
        out,
        format_args!("# HELP opendsec_edge_{name} {help}\n# TYPE opendsec_edge_{name} {kind}\n"),
    );
}

fn sample(out: &mut String, name: &str, labels: &str, value: u64) {
    push(
        out,
        format_args!("opendsec_edge_{name}{{{labels}}} {value}\n"),
    );
}

/// Resident memory of this process, from `/proc/self/statm` (proc_pid_statm(5)); 0 if unreadable.
fn resident_bytes() -> Counter {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| {
            text.split_ascii_whitespace()
                .nth(1)
                .and_then(|word| word.parse().ok())
        })
        .unwrap_or(0u64);
    let counter = Counter::new();
    counter.set(pages * rustix::param::page_size() as u64);
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_comment_or_a_sample() {
        METRICS.request_done(Class::Agent, 204, 3, 5);
        METRICS.answered(Class::Agent, Duration::from_millis(2));
        METRICS.upstream_failed(UpstreamFailure::Connect);
        let text = METRICS.render();
        for line in text.lines() {
            let is_sample = line.starts_with("opendsec_edge_")
                && line
                    .rsplit(' ')
                    .next()
                    .is_some_and(|value| value.parse::<f64>().is_ok());
            assert!(line.starts_with("# ") || is_sample, "{line}");
        }
        assert!(text.contains("class=\"agent\",le=\"+Inf\""));
    }
}
