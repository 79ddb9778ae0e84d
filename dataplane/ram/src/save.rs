// SPDX-License-Identifier: Apache-2.0
//! Writes the RAM of a stopped VM to a file.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, mpsc};

use serde::Serialize;

use crate::process::{private_pages, read_memory};
use crate::sums::{Sums, for_each_data, page_sum};
use crate::{Context, Error, PAGE, Result};

/// What one worker holds in memory at a time.
const CHUNK: u64 = 1 << 20;
const WORKERS_MAX: usize = 4;
/// `_IOW(0x94, 9, int)`, linux/fs.h.
const FICLONE: libc::c_ulong = 0x4004_9409;

/// What a save did; printed as JSON.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Length of the RAM.
    pub total_bytes: u64,
    /// Pages that had to be written.
    pub written_bytes: u64,
    /// Private pages that were all zero.
    pub zero_bytes: u64,
    /// What the file occupies, shared blocks included.
    pub disk_bytes: u64,
    /// Whether unchanged pages share their blocks with the base.
    pub reflinked: bool,
}

/// A file that the RAM was mapped from, and its sums.
pub struct Base<'a> {
    /// The file.
    pub file: &'a File,
    /// Its sums.
    pub sums: Sums,
}

/// Writes the memory at `range` of process `pid` to the new file `out`.
///
/// The process must not change it meanwhile. With a base, what the process has not changed is taken
/// from there. Returns also the sums of the new file.
pub fn save(
    pid: i32,
    range: Range<u64>,
    base: Option<Base<'_>>,
    out: &Path,
) -> Result<(Report, Sums)> {
    let len = range.end - range.start;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(out)
        .context(|| format!("cannot create {}", out.display()))?;
    let mut report = Report {
        total_bytes: len,
        ..Report::default()
    };
    let sums = match base {
        None => Sums::zeros(len)?,
        Some(base) => {
            let have = base
                .file
                .metadata()
                .context(|| "cannot stat the base".into())?
                .len();
            if have != len || base.sums.len != len {
                return Err(Error::new(format!(
                    "the base has {have} bytes instead of {len}"
                )));
            }
            report.reflinked = clone_or_copy(base.file, &file)?;
            base.sums
        }
    };
    file.set_len(len)
        .context(|| "cannot set the file's length".into())?;
    let job = Job {
        pid,
        start: range.start,
        file: &file,
        done: Mutex::new((report, sums)),
    };
    job.run(range)?;
    let (mut report, sums) = job.done.into_inner().expect("no worker panicked");
    report.disk_bytes = file
        .metadata()
        .context(|| "cannot stat the file".into())?
        .blocks()
        * 512;
    Ok((report, sums))
}

/// True when the blocks are shared; false when the data were copied.
fn clone_or_copy(base: &File, file: &File) -> Result<bool> {
    // SAFETY: FICLONE takes a descriptor by value.
    if unsafe { libc::ioctl(file.as_raw_fd(), FICLONE, base.as_raw_fd()) } == 0 {
        return Ok(true);
    }
    let error = Error::last("cannot share blocks with the base");
    match error.cause.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY) => {}
        _ => return Err(error),
    }
    let len = base
        .metadata()
        .context(|| "cannot stat the base".into())?
        .len();
    for_each_data(base, len, &mut |offset, data| {
        file.write_all_at(data, offset)
            .context(|| format!("cannot write at byte {offset}"))
    })?;
    Ok(false)
}

struct Job<'a> {
    pid: i32,
    start: u64,
    file: &'a File,
    done: Mutex<(Report, Sums)>,
}

impl Job<'_> {
    fn run(&self, range: Range<u64>) -> Result<()> {
        let workers = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(WORKERS_MAX);
        let (sender, receiver) = mpsc::sync_channel::<Range<u64>>(2 * workers);
        let receiver = Mutex::new(receiver);
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..workers)
                .map(|_| scope.spawn(|| self.work(&receiver)))
                .collect();
            let found = private_pages(self.pid, range, &mut |mut own| {
                while own.start < own.end {
                    let end = own.end.min(own.start + CHUNK);
                    // Fails only when every worker has failed; their error is told below.
                    if sender.send(own.start..end).is_err() {
                        return Ok(());
                    }
                    own.start = end;
                }
                Ok(())
            });
            drop(sender);
            let mut result = found;
            for worker in running {
                result = result.and(worker.join().expect("no worker panicked"));
            }
            result
        })
    }

    fn work(&self, receiver: &Mutex<mpsc::Receiver<Range<u64>>>) -> Result<()> {
        let mut buffer = vec![0u8; CHUNK as usize];
        let mut failed = Ok(());
        loop {
            let next = receiver.lock().expect("no worker panicked").recv();
            let Ok(part) = next else { return failed };
            // After a failure the rest is only taken from the queue, so that nobody waits for room.
            if failed.is_ok() {
                let data = &mut buffer[..(part.end - part.start) as usize];
                failed = read_memory(self.pid, part.start, data)
                    .and_then(|()| self.store(part.start - self.start, data));
            }
        }
    }

    /// Writes one piece: runs of pages with content, and holes where the base had content.
    fn store(&self, offset: u64, data: &[u8]) -> Result<()> {
        let new: Vec<u64> = data.chunks_exact(PAGE).map(page_sum).collect();
        let first = offset as usize / PAGE;
        let old = {
            let mut done = self.done.lock().expect("no worker panicked");
            let place = &mut done.1.pages[first..first + new.len()];
            let old = place.to_vec();
            place.copy_from_slice(&new);
            let zero = new.iter().filter(|sum| **sum == 0).count();
            done.0.zero_bytes += (zero * PAGE) as u64;
            done.0.written_bytes += ((new.len() - zero) * PAGE) as u64;
            old
        };
        let kind = |page: usize| (new[page] == 0, new[page] == 0 && old[page] == 0);
        let mut page = 0;
        while page < new.len() {
            let run = page;
            while page < new.len() && kind(page) == kind(run) {
                page += 1;
            }
            let at = offset + (run * PAGE) as u64;
            match kind(run) {
                (true, true) => {}
                (true, false) => punch(self.file, at, ((page - run) * PAGE) as u64)?,
                (false, _) => self
                    .file
                    .write_all_at(&data[run * PAGE..page * PAGE], at)
                    .context(|| format!("cannot write at byte {at}"))?,
            }
        }
        Ok(())
    }
}

fn punch(file: &File, at: u64, len: u64) -> Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: fallocate takes its arguments by value.
    let code = unsafe { libc::fallocate(file.as_raw_fd(), mode, at as i64, len as i64) };
    if code == 0 {
        return Ok(());
    }
    let error = Error::last(format!("cannot punch a hole at byte {at}"));
    if error.cause.raw_os_error() != Some(libc::EOPNOTSUPP) {
        return Err(error);
    }
    let zeros = vec![0u8; len as usize];
    file.write_all_at(&zeros, at)
        .context(|| format!("cannot write at byte {at}"))
}
