// SPDX-License-Identifier: Apache-2.0
//! A started program: its listeners, its input, its end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

use super::exit::Exit;
use super::messages::{Input, ProcessConfig, Size};
use super::output::Source;
use crate::connect::{Code, RpcError};
use crate::limits::{OUTPUT_QUEUE_EVENTS, STREAM_STALL_MAX};
use crate::sys::proc::ProcStat;

const COLS_DEFAULT: u16 = 80;
const ROWS_DEFAULT: u16 = 24;

/// What listeners of a process hear.
#[derive(Clone, Debug)]
pub enum Event {
    /// A piece of output.
    Output(Source, Bytes),
    /// The end; nothing follows.
    End(Exit),
}

#[derive(Default)]
struct Listeners {
    queues: Vec<mpsc::Sender<Event>>,
    end: Option<Exit>,
}

/// Where a process takes its input from.
pub enum Feed {
    /// Nothing: `/dev/null`, or closed.
    None,
    /// A pipe.
    Pipe(Arc<AsyncFd<OwnedFd>>),
}

/// A started program.
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its keeper, as `/proc` showed it at the start; `None` if it could not be read.
    pub keeper: Option<ProcStat>,
    /// What was asked to be run.
    pub config: ProcessConfig,
    /// The name it was given.
    pub tag: Option<String>,
    /// Set when the program itself, not all its descendants, has ended.
    pub main_ended: watch::Sender<bool>,
    /// Whether its time was over before it ended.
    pub timed_out: AtomicBool,
    listeners: Mutex<Listeners>,
    feed: Mutex<Feed>,
    /// Keeps the bytes of one call together.
    feeding: tokio::sync::Mutex<()>,
    terminal: Option<Arc<AsyncFd<OwnedFd>>>,
}

impl Process {
    /// A program that has just been started.
    pub fn new(
        pid: u32,
        keeper: Option<ProcStat>,
        config: ProcessConfig,
        tag: Option<String>,
        feed: Feed,
        terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    ) -> Self {
        Self {
            pid,
            keeper,
            config,
            tag,
            main_ended: watch::Sender::new(false),
            timed_out: AtomicBool::new(false),
            listeners: Mutex::default(),
            feed: Mutex::new(feed),
            feeding: tokio::sync::Mutex::default(),
            terminal,
        }
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens from now on. A process that has ended says so at once.
    pub fn listen(&self) -> mpsc::Receiver<Event> {
        let (queue, events) = mpsc::channel(OUTPUT_QUEUE_EVENTS);
        let mut listeners = self.listeners();
        if let Some(end) = &listeners.end {
            let _ = queue.try_send(Event::End(end.clone()));
        } else {
            listeners.queues.push(queue);
        }
        events
    }

    /// Tells all listeners, at the speed of the slowest; with none, output is dropped. A listener
    /// that takes nothing for a stated time is let go.
    pub async fn publish(&self, event: Event) {
        let queues = {
            let mut listeners = self.listeners();
            if let Event::End(exit) = &event {
                listeners.end = Some(exit.clone());
                std::mem::take(&mut listeners.queues)
            } else {
                listeners.queues.clone()
            }
        };
        for queue in queues {
            let sent = match queue.try_send(event.clone()) {
                Ok(()) => true,
                Err(TrySendError::Closed(_)) => false,
                Err(TrySendError::Full(event)) => {
                    queue.send_timeout(event, STREAM_STALL_MAX).await.is_ok()
                }
            };
            if !sent {
                self.listeners()
                    .queues
                    .retain(|other| !other.same_channel(&queue));
            }
        }
    }

    /// Notes that the time given for the program is over.
    pub fn mark_timed_out(&self) {
        self.timed_out.store(true, Ordering::Relaxed);
    }

    /// Whether the time given for the program was over before it ended.
    pub fn is_timed_out(&self) -> bool {
        self.timed_out.load(Ordering::Relaxed)
    }

    /// Waits until the program has ended.
    pub async fn ended(&self) {
        // The sender lives as long as this process.
        let _ = self
            .main_ended
            .subscribe()
            .wait_for(|ended| *ended)
            .await
            .map(|_| ());
    }

    /// Whether the program has ended.
    pub fn has_ended(&self) -> bool {
        *self.main_ended.borrow()
    }

    /// Gives bytes to the program; waits while it does not read them.
    ///
    /// Errors: `internal` if it takes no such input (as the protocol has it), or has closed it.
    pub async fn give(&self, input: Input) -> Result<(), RpcError> {
        let (target, data) = match (input.stdin, input.pty) {
            (Some(data), _) => (self.pipe()?, data),
            (None, Some(data)) => (self.terminal()?, data),
            (None, None) => {
                return Err(RpcError::new(
                    Code::Unimplemented,
                    "input: give stdin or pty",
                ));
            }
        };
        let _turn = self.feeding.lock().await;
        tokio::select! {
            written = write_all(&target, &data) => written.map_err(|err| {
                RpcError::new(Code::Internal, format!("cannot write to process {}: {err}", self.pid))
            }),
            () = self.ended() => {
                Err(RpcError::new(Code::Internal, format!("process {} has ended", self.pid)))
            }
        }
    }

    fn pipe(&self) -> Result<Arc<AsyncFd<OwnedFd>>, RpcError> {
        if self.terminal.is_some() {
            let what = "the process has a terminal: write to the pty, not to stdin";
            return Err(RpcError::new(Code::Internal, what));
        }
        match &*self.feed.lock().unwrap_or_else(PoisonError::into_inner) {
            Feed::Pipe(pipe) => Ok(Arc::clone(pipe)),
            Feed::None => Err(RpcError::new(
                Code::Internal,
                "stdin is not enabled or closed",
            )),
        }
    }

    fn terminal(&self) -> Result<Arc<AsyncFd<OwnedFd>>, RpcError> {
        self.terminal.clone().ok_or_else(|| {
            let what = "the process has no terminal: write to stdin, not to the pty";
            RpcError::new(Code::Internal, what)
        })
    }

    /// Closes standard input. Bytes of a call that still waits are written first.
    ///
    /// Errors: `unknown` for a process with a terminal (as the protocol has it).
    pub async fn close_input(&self) -> Result<(), RpcError> {
        if self.terminal.is_some() {
            let what = "cannot close stdin of a terminal, send Ctrl+D (0x04) instead";
            return Err(RpcError::new(Code::Unknown, what));
        }
        let _turn = self.feeding.lock().await;
        *self.feed.lock().unwrap_or_else(PoisonError::into_inner) = Feed::None;
        Ok(())
    }

    /// Changes the size of the terminal.
    ///
    /// Errors: `internal` if there is none.
    pub fn resize(&self, size: Size) -> Result<(), RpcError> {
        let terminal = self.terminal.as_ref().ok_or_else(|| {
            RpcError::new(Code::Internal, "the process has no terminal to resize")
        })?;
        rustix::termios::tcsetwinsize(terminal.get_ref(), winsize(size))
            .map_err(|err| RpcError::new(Code::Internal, format!("cannot resize: {err}")))
    }

    /// Sends a signal to the program itself.
    ///
    /// Errors: `not_found` if it has ended.
    pub fn signal(&self, number: i32) -> Result<(), RpcError> {
        if self.has_ended() {
            return Err(RpcError::not_found(format!(
                "process {} has ended",
                self.pid
            )));
        }
        let pid = i32::try_from(self.pid).unwrap_or(i32::MAX);
        // SAFETY: kill(2) with plain numbers.
        if unsafe { libc::kill(pid, number) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            err if err.raw_os_error() == Some(libc::ESRCH) => {
                Err(RpcError::not_found(format!("process {pid} has ended")))
            }
            err => Err(RpcError::from_io("cannot signal the process", &err)),
        }
    }
}

/// A terminal size; zero and absent mean the usual one.
pub fn winsize(size: Size) -> Winsize {
    let pick = |given: Option<u32>, default: u16| match given {
        None | Some(0) => default,
        Some(number) => u16::try_from(number).unwrap_or(u16::MAX),
    };
    Winsize {
        ws_col: pick(size.cols, COLS_DEFAULT),
        ws_row: pick(size.rows, ROWS_DEFAULT),
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

async fn write_all(fd: &AsyncFd<OwnedFd>, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        let mut ready = fd.writable().await?;
        let written = ready.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), data)?));
        match written {
            Ok(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(Ok(count)) => data = &data[count..],
            Ok(Err(err)) if err.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(err)) => return Err(err),
            Err(_) => {}
        }
    }
    Ok(())
}
