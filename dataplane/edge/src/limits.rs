// SPDX-License-Identifier: Apache-2.0
//! Every limit and time-out of the edge, in one place.
//!
//! Names carry their unit. Those a flag can change are only defaults here.

use std::time::Duration;

/// Largest request head (request line and headers) in bytes; above it the answer is 431.
pub const HEADER_BYTES_MAX: usize = 64 * 1024;
/// Most header lines in one message; above it the answer is 431.
pub const HEADER_COUNT_MAX: usize = 128;
/// Largest read buffer of one HTTP/1 connection. Reads grow up to it while a body streams fast,
/// so it bounds both throughput and memory per busy connection.
pub const H1_BUFFER_BYTES_MAX: usize = 256 * 1024;
/// Longest request id that is taken over from the client, in bytes.
pub const REQUEST_ID_BYTES_MAX: usize = 128;
/// Longest sandbox id that is looked up, in bytes.
pub const SANDBOX_ID_BYTES_MAX: usize = 64;

/// HTTP/2: most concurrent streams of one connection.
pub const H2_STREAMS_MAX: u32 = 256;
/// HTTP/2: receive window of one stream, in bytes.
pub const H2_STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
/// HTTP/2: receive window of one connection, in bytes. Bounds memory per connection.
pub const H2_CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
/// HTTP/2: bytes buffered for sending per stream.
pub const H2_SEND_BUFFER_BYTES: usize = 256 * 1024;
/// HTTP/2: largest frame that the peer may send, in bytes.
pub const H2_FRAME_BYTES_MAX: u32 = 64 * 1024;
/// HTTP/2: pause between liveness pings.
pub const H2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// HTTP/2: how long a ping may stay unanswered.
pub const H2_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// From the first byte of a request head to its end.
pub const HEADER_READ_TIMEOUT_S: u64 = 20;
/// A connection without a request under way is closed after this. Longer than the 300 s that
/// E2B's SDKs keep idle connections, so that the client closes first and no request is lost.
pub const CLIENT_IDLE_TIMEOUT_S: u64 = 320;
/// A connection without a request for this long gives up its buffers. Checked twice, so it takes
/// up to twice as long.
pub const REST_AFTER: Duration = Duration::from_secs(2);
/// Connections that must have given up memory before it is returned to the system.
pub const TRIM_AFTER_FREED: usize = 256;
/// Pause between looks whether to return memory to the system.
pub const TRIM_INTERVAL: Duration = Duration::from_secs(3);
/// TLS handshake, from the first byte of the hello.
pub const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a refused connection may take to send the head that its refusal answers.
pub const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Most refusals written at the same time; beyond it connections are simply closed.
pub const REFUSALS_MAX: usize = 128;
/// Default cap on open client connections.
pub const CLIENT_CONNECTIONS_MAX: usize = 20_000;
/// Length of the kernel's accept queue.
pub const LISTEN_BACKLOG: i32 = 4_096;
/// Pause after `accept` failed for want of descriptors or memory.
pub const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(50);

/// TCP keepalive: idle time before the first probe.
pub const TCP_KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// TCP keepalive: pause between probes.
pub const TCP_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// TCP keepalive: unanswered probes until the connection counts as dead.
pub const TCP_KEEPALIVE_PROBES: u32 = 3;

/// Connecting to a sandbox's agent.
pub const AGENT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Setting up a tunnel to a user port, after the agent took the connection.
pub const TUNNEL_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest head of the agent's answer to a tunnel request, in bytes.
pub const TUNNEL_HEAD_BYTES_MAX: usize = 8 * 1024;
/// Idle connections to the agent of one sandbox are closed after this.
pub const AGENT_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle tunnels are closed after this. Shorter than the 5 s after which common application
/// servers close on their own, so that a request rarely meets a connection that is closing.
pub const PORT_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Idle connections to the API are closed after this; its server closes at 5 s.
pub const API_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Most idle connections kept to one agent.
pub const AGENT_IDLE_MAX: usize = 32;
/// Most idle tunnels kept to one port of one sandbox.
pub const PORT_IDLE_MAX: usize = 8;
/// Most idle connections kept to the API.
pub const API_IDLE_MAX: usize = 64;
/// Most open connections to one sandbox, all ports together.
pub const SANDBOX_CONNECTIONS_MAX: usize = 1_024;
/// Most open connections to the API.
pub const API_CONNECTIONS_MAX: usize = 4_096;
/// Pause between two passes over the pools and the cache.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Most cached routes. Beyond it the least recently used sixteenth is dropped.
pub const ROUTES_MAX: usize = 16_384;
/// Longest wait for the control plane to answer a route request; it blocks while a sandbox starts,
/// pauses or resumes.
pub const ROUTE_TIMEOUT: Duration = Duration::from_secs(60);
/// Most different questions under way about one sandbox. Requests with the same port and tokens
/// share one.
pub const QUESTIONS_PER_SANDBOX_MAX: usize = 256;
/// Longest token that is passed on to the control plane, in bytes. Ours are shorter.
pub const TOKEN_BYTES_MAX: usize = 256;
/// Largest answer of the control socket, in bytes.
pub const CONTROL_ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Longest line of the invalidation stream, in bytes.
pub const INVALIDATION_LINE_BYTES_MAX: usize = 4 * 1024;
/// Silence on the invalidation stream after which it counts as broken; pings come every 5 s.
pub const INVALIDATION_SILENCE: Duration = Duration::from_secs(16);
/// First and longest pause between attempts to open the invalidation stream.
pub const INVALIDATION_RETRY_MIN: Duration = Duration::from_millis(50);
/// See [`INVALIDATION_RETRY_MIN`].
pub const INVALIDATION_RETRY_MAX: Duration = Duration::from_secs(1);
/// Most route look-ups at a time that check whether streams under way still have a sandbox.
pub const RECHECKS_MAX: usize = 16;
/// How long streams of a sandbox that is gone may end by themselves before the edge ends them.
pub const GONE_GRACE: Duration = Duration::from_secs(2);

/// Copy buffer of an upgraded connection, per direction, in bytes.
pub const UPGRADE_BUFFER_BYTES: usize = 16 * 1024;
/// Largest WebSocket message that a console's client may send, in bytes.
pub const CONSOLE_MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// How long a console's client may take no bytes before it is dropped.
pub const CONSOLE_STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Connecting to a machine monitor's socket, and saying good-bye to a console's client.
pub const CONSOLE_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Default time for requests under way to finish after SIGTERM.
pub const DRAIN_S: u64 = 5;
/// Time for the last frames to be written after the drain time is over.
pub const FINAL_FLUSH: Duration = Duration::from_millis(500);
/// Log lines that may wait for a slow reader of standard error; further ones are dropped.
pub const LOG_QUEUE_LINES: usize = 8_192;
/// Descriptors kept for everything but client and sandbox connections.
pub const RESERVED_FDS: u64 = 128;
