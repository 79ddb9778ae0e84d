// SPDX-License-Identifier: Apache-2.0
//! Command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;

use crate::limits::{
    CLIENT_CONNECTIONS_MAX, CLIENT_IDLE_TIMEOUT_S, DRAIN_S, HEADER_READ_TIMEOUT_S,
};
use crate::log::{Level, LogFormat};

/// One port for everything: OpenDsec's API and the traffic of every sandbox.
///
/// Requests that name a sandbox go to it; all others go to the API. Signals: SIGTERM and SIGINT
/// drain and end, SIGHUP reads the TLS certificate again.
#[derive(Clone, Debug, Parser)]
#[command(name = "opendsec-edge", version, about, long_about)]
pub struct Args {
    /// Address and port to listen on. May be given more than once, for example for IPv4 and IPv6.
    #[arg(long, required = true, value_name = "ADDRESS:PORT")]
    pub listen: Vec<SocketAddr>,

    /// Unix socket of the public API.
    #[arg(long, value_name = "PATH")]
    pub api_socket: PathBuf,

    /// Unix socket that answers routes and sends invalidations.
    #[arg(long, value_name = "PATH")]
    pub control_socket: PathBuf,

    /// Domain of sandbox hosts `<port>-<id>.<domain>`; a port in it is ignored.
    #[arg(long, value_name = "DOMAIN")]
    pub domain: String,

    /// Certificate chain in PEM. TLS is then served on the same port as plain HTTP.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of the certificate, in PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Unix socket that answers Prometheus' scrapes.
    #[arg(long, value_name = "PATH")]
    pub metrics_socket: Option<PathBuf>,

    /// Form of log lines.
    #[arg(long, value_enum, default_value = "json")]
    pub log_format: LogFormat,

    /// Least severity of log lines.
    #[arg(long, value_enum, default_value = "info")]
    pub log_level: Level,

    /// Write one line for every request.
    #[arg(long)]
    pub access_log: bool,

    /// Keep X-Forwarded-* and Forwarded headers of clients. Only behind a proxy that sets them.
    #[arg(long)]
    pub trust_forwarded: bool,

    /// Seconds that requests under way may take to finish after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = DRAIN_S)]
    pub drain_s: u64,

    /// Most open client connections. The descriptor limit may lower it.
    #[arg(long, value_name = "COUNT", default_value_t = CLIENT_CONNECTIONS_MAX)]
    pub max_connections: usize,

    /// Seconds that a request head may take.
    #[arg(long, value_name = "SECONDS", default_value_t = HEADER_READ_TIMEOUT_S)]
    pub header_timeout_s: u64,

    /// Seconds after which a connection without a request under way is closed.
    #[arg(long, value_name = "SECONDS", default_value_t = CLIENT_IDLE_TIMEOUT_S)]
    pub idle_timeout_s: u64,

    /// Worker threads. Default: one for each CPU core.
    #[arg(long, value_name = "COUNT")]
    pub workers: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_certificate_needs_its_key() {
        let base = [
            "edge",
            "--listen",
            "127.0.0.1:1",
            "--api-socket",
            "a",
            "--control-socket",
            "c",
        ];
        let with = |extra: &[&str]| {
            Args::try_parse_from(base.iter().chain(["--domain", "d"].iter()).chain(extra))
        };
        assert!(with(&[]).is_ok());
        assert!(with(&["--tls-cert", "x"]).is_err());
        assert!(with(&["--tls-cert", "x", "--tls-key", "y"]).is_ok());
        assert_eq!(with(&["--listen", "[::1]:1"]).expect("two").listen.len(), 2);
    }
}
