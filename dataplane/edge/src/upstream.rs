// SPDX-License-Identifier: Apache-2.0
//! Makes connections to agents, to ports in sandboxes, and to the API.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::limits::{AGENT_CONNECT_TIMEOUT, TUNNEL_TIMEOUT};
use crate::listener::tune_tcp;
use crate::{tls, tunnel};

/// Any byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Why no connection was made.
#[derive(Debug)]
pub enum ConnectError {
    /// The other side cannot be reached, or broke off.
    Unreachable(String),
    /// Nothing listens on the port in the sandbox.
    PortClosed,
    /// The agent does not know our token: the route is old.
    Refused,
    /// No descriptors left here.
    Exhausted,
    /// Too many connections to this peer.
    Limit(usize),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        let errno = rustix::io::Errno::from_io_error(&error);
        if matches!(
            errno,
            Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)
        ) {
            ConnectError::Exhausted
        } else {
            ConnectError::Unreachable(error.to_string())
        }
    }
}

/// The far end of a pool's connections.
#[derive(Clone, Debug)]
pub enum Peer {
    /// The API's Unix socket.
    Api(PathBuf),
    /// A sandbox's agent.
    Agent(SocketAddr),
    /// A port in a sandbox.
    Port(PortPeer),
}

/// A port in a sandbox, behind its agent.
#[derive(Clone, Debug)]
pub struct PortPeer {
    /// The agent.
    pub agent: SocketAddr,
    /// The port.
    pub port: u16,
    /// Token for the agent's internal routes.
    pub control_token: Arc<str>,
    /// Whether the program on the port speaks TLS.
    pub tls: bool,
}

impl Peer {
    /// Connect. `host` is the request's authority; it becomes the TLS server name where TLS is spoken.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(&self, host: &str) -> Result<Box<dyn Stream>, ConnectError> {
        match self {
            Peer::Api(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Peer::Agent(address) => Ok(Box::new(connect_tcp(*address).await?)),
            Peer::Port(peer) => {
                let stream = connect_tcp(peer.agent).await?;
                let stream = tunnel::open(stream, peer.port, &peer.control_token).await?;
                if !peer.tls {
                    return Ok(Box::new(stream));
                }
                let connector = TlsConnector::from(tls::insecure_client_config());
                let handshake = connector.connect(server_name(host), stream);
                match timeout(TUNNEL_TIMEOUT, handshake).await {
                    Ok(stream) => Ok(Box::new(stream?)),
                    Err(_) => Err(ConnectError::Unreachable(
                        "TLS to the port timed out".to_owned(),
                    )),
                }
            }
        }
    }
}

async fn connect_tcp(address: SocketAddr) -> Result<TcpStream, ConnectError> {
    match timeout(AGENT_CONNECT_TIMEOUT, TcpStream::connect(address)).await {
        Ok(stream) => {
            let stream = stream?;
            tune_tcp(&stream);
            Ok(stream)
        }
        Err(_) => Err(ConnectError::Unreachable("connecting timed out".to_owned())),
    }
}

fn server_name(authority: &str) -> ServerName<'static> {
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    ServerName::try_from(host.to_owned())
        .unwrap_or(ServerName::IpAddress(IpAddr::from([127, 0, 0, 1]).into()))
}
