// SPDX-License-Identifier: Apache-2.0
//! A client's connection, with the time-outs that apply while no request is under way.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;

/// What a connection's tasks share.
#[derive(Debug, Default)]
pub struct ConnState {
    /// Requests whose bodies are not finished, in either direction.
    busy: AtomicU32,
    /// Requests begun since the connection was opened.
    begun: AtomicU64,
    /// Close with a reset: the end of the stream must not look like the end of the answer.
    reset: AtomicBool,
    /// The last write could not be finished: HTTP still holds bytes for the client.
    write_blocked: AtomicBool,
    /// A request's body was not read to its end: where the next request starts is not certain.
    body_left: AtomicBool,
}

impl ConnState {
    /// Note a request; it is under way until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> BusyGuard {
        self.begun.fetch_add(1, Ordering::Release);
        self.busy.fetch_add(1, Ordering::Release);
        BusyGuard(Arc::clone(self))
    }

    /// Note a request whose body nobody reads to its end.
    pub fn leave_body(&self) {
        self.body_left.store(true, Ordering::Release);
    }

    /// Requests begun so far, if none is under way and nothing is left to be read or written for
    /// them: the connection stands exactly between two requests.
    pub fn at_rest(&self) -> Option<u64> {
        let begun = self.begun.load(Ordering::Acquire);
        let busy = self.busy.load(Ordering::Acquire) > 0;
        let unfinished =
            self.write_blocked.load(Ordering::Acquire) || self.body_left.load(Ordering::Acquire);
        (!busy && !unfinished && begun > 0).then_some(begun)
    }

    /// Make the close a reset.
    pub fn reset_on_close(&self) {
        self.reset.store(true, Ordering::Release);
    }
}

/// A request under way.
#[derive(Debug)]
pub struct BusyGuard(Arc<ConnState>);

impl BusyGuard {
    /// The connection it belongs to.
    pub fn connection(&self) -> &ConnState {
        &self.0
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Release);
    }
}

/// How long a connection may wait outside requests.
#[derive(Clone, Copy, Debug)]
pub struct WaitLimits {
    /// From the first byte of a head to its end. `None` where frames make "head" meaningless.
    pub head: Option<Duration>,
    /// Without any request.
    pub idle: Duration,
}

/// The transport below HTTP.
#[derive(Debug)]
pub enum Transport {
    /// Plain TCP.
    Plain(TcpStream),
    /// TLS over TCP.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Transport {
    fn tcp(&self) -> &TcpStream {
        match self {
            Transport::Plain(stream) => stream,
            Transport::Tls(stream) => stream.get_ref().0,
        }
    }
}

macro_rules! with_transport {
    ($self:expr, $stream:ident => $body:expr) => {
        match &mut $self.transport {
            Transport::Plain($stream) => {
                let $stream = Pin::new($stream);
                $body
            }
            Transport::Tls($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $body
            }
        }
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// A request is under way: no limit.
    No,
    /// For the first byte of a request. Holds how many requests had begun before it.
    Idle(u64),
    /// For the rest of a head. Holds the same.
    Head(u64),
}

/// A client's connection as HTTP sees it.
#[derive(Debug)]
pub struct ClientIo {
    transport: Transport,
    state: Arc<ConnState>,
    limits: WaitLimits,
    waiting: Waiting,
    timer: Option<Pin<Box<Sleep>>>,
}

impl ClientIo {
    /// Wrap a transport. The first head is expected at once: its time starts now.
    pub fn new(transport: Transport, state: Arc<ConnState>, limits: WaitLimits) -> Self {
        let mut io = ClientIo {
            transport,
            state,
            limits,
            waiting: Waiting::No,
            timer: None,
        };
        io.wait(match limits.head {
            Some(_) => Waiting::Head(0),
            None => Waiting::Idle(0),
        });
        io
    }

    fn wait(&mut self, waiting: Waiting) {
        self.waiting = waiting;
        let limit = match waiting {
            Waiting::No => return,
            Waiting::Idle(_) => self.limits.idle,
            Waiting::Head(_) => self.limits.head.unwrap_or(self.limits.idle),
        };
        let deadline = Instant::now() + limit;
        match &mut self.timer {
            Some(timer) => timer.as_mut().reset(deadline),
            None => self.timer = Some(Box::pin(tokio::time::sleep_until(deadline))),
        }
    }

    /// Bring `waiting` in line with the requests begun and ended since the last read.
    fn settle(&mut self) {
        let busy = self.state.busy.load(Ordering::Acquire) > 0;
        let begun = self.state.begun.load(Ordering::Acquire);
        match self.waiting {
            _ if busy => self.waiting = Waiting::No,
            Waiting::Head(before) | Waiting::Idle(before) if before == begun => {}
            Waiting::No | Waiting::Head(_) | Waiting::Idle(_) => self.wait(Waiting::Idle(begun)),
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = with_transport!(self, stream => stream.poll_read(cx, buf));
        self.settle();
        if read.is_ready() {
            if let Waiting::Idle(begun) = self.waiting
                && self.limits.head.is_some()
                && buf.filled().len() > before
            {
                self.wait(Waiting::Head(begun));
            }
            return read;
        }
        if self.waiting != Waiting::No
            && let Some(timer) = &mut self.timer
            && timer.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Pending
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = with_transport!(self, stream => stream.poll_write(cx, buf));
        self.state
            .write_blocked
            .store(written.is_pending(), Ordering::Release);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = with_transport!(self, stream => stream.poll_write_vectored(cx, bufs));
        self.state
            .write_blocked
            .store(written.is_pending(), Ordering::Release);
        written
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Plain(stream) => stream.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = with_transport!(self, stream => stream.poll_flush(cx));
        self.state
            .write_blocked
            .store(flushed.is_pending(), Ordering::Release);
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.state.reset.load(Ordering::Acquire) {
            // The drop that follows resets; an orderly shutdown before it would undo that.
            return Poll::Ready(Ok(()));
        }
        with_transport!(self, stream => stream.poll_shutdown(cx))
    }
}

impl Drop for ClientIo {
    fn drop(&mut self) {
        if self.state.reset.load(Ordering::Acquire) {
            // Fails only on a socket that is already gone.
            drop(self.transport.tcp().set_zero_linger());
        }
    }
}
