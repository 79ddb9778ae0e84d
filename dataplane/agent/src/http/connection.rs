// SPDX-License-Identifier: Apache-2.0
//! A client's connection that can be cut.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::agent::Agent;

/// A TCP stream. If it was cut (see `Agent::drop_connections`), closing it sends a reset and not
/// an orderly end: what it carried is neither finished nor to be finished.
pub struct Connection {
    stream: TcpStream,
    agent: Arc<Agent>,
    number: u64,
}

impl Connection {
    /// Takes an accepted stream and its number.
    pub fn new(stream: TcpStream, agent: Arc<Agent>, number: u64) -> Self {
        Self {
            stream,
            agent,
            number,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.agent.is_cut(self.number) {
            let _ = rustix::net::sockopt::set_socket_linger(
                &self.stream,
                Some(std::time::Duration::ZERO),
            );
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
