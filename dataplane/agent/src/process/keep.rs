// SPDX-License-Identifier: Apache-2.0
//! The output of a program that the node started with the sandbox, for people to look at: nobody
//! listens to it any more once it is ready.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tokio::sync::mpsc;

use super::live::Event;
use crate::limits::START_LOG_BYTES_MAX;
use crate::sys::pool;

/// The tag by which the node names such a program.
pub const TAG: &str = "opendsec-start";
const DIR: &str = "/run/opendsec";
const LOG: &str = "start.log";
const OLDER_LOG: &str = "start.log.1";

/// Writes what a program prints until it ends. What cannot be written is not kept.
pub async fn keep(events: mpsc::Receiver<Event>) {
    keep_in(PathBuf::from(DIR), events).await;
}

async fn keep_in(dir: PathBuf, mut events: mpsc::Receiver<Event>) {
    let mut log = Log::open(dir.clone());
    while let Some(Event::Output(_, data)) = events.recv().await {
        let again = dir.clone();
        let written = pool::run(move || {
            // After a failure, what comes later may find room again.
            let mut log = log.or_else(|_| Log::open(again))?;
            log.write(&data).map(|()| log)
        });
        log = written.await.and_then(|log| log);
    }
}

/// Two files that take turns, so that the latest output is always there.
struct Log {
    dir: PathBuf,
    file: File,
    bytes: u64,
}

impl Log {
    fn open(dir: PathBuf) -> io::Result<Self> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o755).create(&dir)?;
        let file = create(&dir.join(LOG))?;
        Ok(Self {
            dir,
            file,
            bytes: 0,
        })
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        if self.bytes >= START_LOG_BYTES_MAX {
            fs::rename(self.dir.join(LOG), self.dir.join(OLDER_LOG))?;
            self.file = create(&self.dir.join(LOG))?;
            self.bytes = 0;
        }
        self.file.write_all(data)?;
        self.bytes += data.len() as u64;
        Ok(())
    }
}

fn create(path: &Path) -> io::Result<File> {
    let _ = fs::remove_file(path);
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o640)
        .open(path)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::exit::Exit;
    use super::super::output::Source;
    use super::*;

    #[tokio::test]
    async fn the_latest_output_is_kept() {
        let dir = crate::testing::TempDir::new();
        let folder = dir.path().join("log");
        let (queue, events) = mpsc::channel(4);
        let keeping = tokio::spawn(keep_in(folder.clone(), events));
        let piece = Bytes::from(vec![b'x'; 100 * 1024]);
        for _ in 0..8 {
            let event = Event::Output(Source::Stdout, piece.clone());
            queue.send(event).await.unwrap();
        }
        let last = Event::Output(Source::Stderr, Bytes::from_static(b"last"));
        queue.send(last).await.unwrap();
        queue.send(Event::End(Exit::Code(0))).await.unwrap();
        keeping.await.unwrap();
        let size = |name: &str| fs::metadata(folder.join(name)).unwrap().len();
        assert!(size(LOG) + size(OLDER_LOG) <= 2 * START_LOG_BYTES_MAX + 200 * 1024);
        assert!(fs::read(folder.join(LOG)).unwrap().ends_with(b"last"));
    }
}
