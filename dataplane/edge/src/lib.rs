// SPDX-License-Identifier: Apache-2.0
//! OpenDsec's edge: one port for the API and for the traffic of every sandbox.
//!
//! A request flows through `connection` (protocol), `proxy` (destination), `cache` (route) and
//! `exchange` (a pooled connection), and its bodies through `body`.

mod body;
mod cache;
/// Command line.
pub mod cli;
mod client_io;
mod connection;
mod console;
mod context;
mod control;
mod errors;
mod exchange;
mod framing;
mod headers;
mod invalidations;
mod limits;
mod link;
mod listener;
/// Log lines.
pub mod log;
mod memory;
mod metrics;
mod metrics_socket;
mod pool;
mod prefixed;
mod proxy;
mod routing;
/// Start and end.
pub mod server;
mod tls;
mod tunnel;
mod upgrade;
mod upstream;
