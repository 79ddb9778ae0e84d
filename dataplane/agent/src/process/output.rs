// SPDX-License-Identifier: Apache-2.0
//! Reading what a program writes: in pieces, no faster than its listeners take it.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

use super::live::{Event, Process};
use crate::limits::{OUTPUT_CHUNK_BYTES, OUTPUT_GRACE};

/// Where a piece of output came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal.
    Pty,
}

impl Source {
    /// The field of the `data` event.
    pub fn field(self) -> &'static str {
        match self {
            Source::Stdout => "stdout",
            Source::Stderr => "stderr",
            Source::Pty => "pty",
        }
    }
}

thread_local! {
    /// One buffer for all readers: they run on one thread, and none keeps it across an await.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; OUTPUT_CHUNK_BYTES]);
}

enum Piece {
    Data(Bytes),
    End,
}

/// Reads until the program's side is closed or the program has ended.
///
/// A descendant that lives on may hold the pipe open. So after the program's end the reader waits
/// a short time for the pipe to close, then takes what is in it, and is done. What comes later is
/// read and dropped, so that the descendant does not die of a broken pipe.
pub async fn read(process: Arc<Process>, fd: Arc<AsyncFd<OwnedFd>>, source: Source) {
    let done = tokio::select! {
        biased;
        () = pump(&process, &fd, source) => true,
        () = after_grace(&process) => false,
    };
    if done {
        return;
    }
    let mut left = rustix::io::ioctl_fionread(&*fd).unwrap_or(0);
    while left > 0 {
        match try_read(&fd, left) {
            Ok(Piece::Data(data)) => {
                left = left.saturating_sub(data.len() as u64);
                process.publish(Event::Output(source, data)).await;
            }
            Ok(Piece::End) | Err(_) => break,
        }
    }
    tokio::spawn(async move { while let Ok(Piece::Data(_)) = next(&fd).await {} });
}

async fn after_grace(process: &Process) {
    process.ended().await;
    sleep(OUTPUT_GRACE).await;
}

async fn pump(process: &Process, fd: &AsyncFd<OwnedFd>, source: Source) {
    while let Ok(Piece::Data(data)) = next(fd).await {
        process.publish(Event::Output(source, data)).await;
    }
}

async fn next(fd: &AsyncFd<OwnedFd>) -> io::Result<Piece> {
    loop {
        let mut ready = fd.readable().await?;
        if let Ok(result) = ready.try_io(|fd| read_piece(fd.get_ref(), OUTPUT_CHUNK_BYTES)) {
            return result;
        }
    }
}

fn try_read(fd: &AsyncFd<OwnedFd>, most: u64) -> io::Result<Piece> {
    let most = usize::try_from(most)
        .unwrap_or(OUTPUT_CHUNK_BYTES)
        .min(OUTPUT_CHUNK_BYTES);
    read_piece(fd.get_ref(), most)
}

fn read_piece(fd: &OwnedFd, most: usize) -> io::Result<Piece> {
    SCRATCH.with_borrow_mut(|scratch| match rustix::io::read(fd, &mut scratch[..most]) {
        Ok(0) => Ok(Piece::End),
        Ok(count) => Ok(Piece::Data(Bytes::copy_from_slice(&scratch[..count]))),
        // A terminal says so when nobody has it open any more.
        Err(rustix::io::Errno::IO) => Ok(Piece::End),
        Err(err) => Err(err.into()),
    })
}
