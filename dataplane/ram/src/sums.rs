// SPDX-License-Identifier: Apache-2.0
//! One checksum per page of a saved file.
//!
//! A page of zeros has the sum 0, whether it is a hole or was written. Any other page has its XXH3
//! (64 bits), with 1 in the place of 0. A save takes the sums of unchanged pages over from its base,
//! so it hashes only what it writes. The sums say that a file is what was written, not who wrote it.
//!
//! File: 16 bytes of head (`ODSUMS01`, length of the file in bytes as u64), then the sums, all
//! little-endian.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::{Context, Error, PAGE, Result};

const MAGIC: &[u8; 8] = b"ODSUMS01";
const HEAD: usize = 16;
const CHUNK: usize = 1 << 20;

/// Whether a page holds nothing but zeros.
pub fn is_zero(page: &[u8]) -> bool {
    // SAFETY: any bytes are valid u128 values.
    let (head, words, tail) = unsafe { page.align_to::<u128>() };
    head.iter().all(|b| *b == 0)
        && words
            .chunks(8)
            .all(|c| c.iter().fold(0, |sum, word| sum | word) == 0)
        && tail.iter().all(|b| *b == 0)
}

/// The sum of a page.
pub fn page_sum(page: &[u8]) -> u64 {
    if is_zero(page) {
        0
    } else {
        xxh3_64(page).max(1)
    }
}

/// The sums of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sums {
    /// Length of the file in bytes, a multiple of [`PAGE`].
    pub len: u64,
    /// One per page.
    pub pages: Vec<u64>,
}

impl Sums {
    /// Those of a file of zeros.
    pub fn zeros(len: u64) -> Result<Self> {
        if !len.is_multiple_of(PAGE as u64) {
            return Err(Error::new(format!(
                "a length of {len} bytes is not a number of pages"
            )));
        }
        Ok(Self {
            len,
            pages: vec![0; (len / PAGE as u64) as usize],
        })
    }

    /// Computes them by reading a file; holes are not read.
    pub fn of(file: &File) -> Result<Self> {
        let len = file
            .metadata()
            .context(|| "cannot stat the file".into())?
            .len();
        let mut sums = Self::zeros(len)?;
        for_each_data(file, len, &mut |offset, data| {
            let first = (offset / PAGE as u64) as usize;
            for (index, page) in data.chunks_exact(PAGE).enumerate() {
                sums.pages[first + index] = page_sum(page);
            }
            Ok(())
        })?;
        Ok(sums)
    }

    /// Reads them from their file.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).context(|| format!("cannot read {}", path.display()))?;
        let damaged = || Error::new(format!("{} is damaged", path.display()));
        if bytes.len() < HEAD || &bytes[..8] != MAGIC {
            return Err(damaged());
        }
        let len = u64::from_le_bytes(bytes[8..HEAD].try_into().expect("eight bytes"));
        if len % PAGE as u64 != 0 || (bytes.len() - HEAD) as u64 / 8 != len / PAGE as u64 {
            return Err(damaged());
        }
        let pages = bytes[HEAD..]
            .chunks_exact(8)
            .map(|sum| u64::from_le_bytes(sum.try_into().expect("eight bytes")))
            .collect();
        Ok(Self { len, pages })
    }

    /// Writes them to a new file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEAD + self.pages.len() * 8);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.len.to_le_bytes());
        for sum in &self.pages {
            bytes.extend_from_slice(&sum.to_le_bytes());
        }
        std::fs::write(path, bytes).context(|| format!("cannot write {}", path.display()))
    }

    /// Compares a file with them. None: it is what was written. Else what is wrong with it.
    pub fn check(&self, file: &File) -> Result<Option<String>> {
        let len = file
            .metadata()
            .context(|| "cannot stat the file".into())?
            .len();
        if len != self.len {
            return Ok(Some(format!("it has {len} bytes instead of {}", self.len)));
        }
        let mut wrong = None;
        let mut next = 0;
        for_each_data(file, len, &mut |offset, data| {
            let first = (offset / PAGE as u64) as usize;
            // Pages in holes before this data must be known as zeros.
            let in_hole = first.saturating_sub(next);
            let hole = self.pages[next..next + in_hole]
                .iter()
                .position(|sum| *sum != 0);
            let bad = hole.map(|at| next + at).or_else(|| {
                data.chunks_exact(PAGE)
                    .zip(&self.pages[first..])
                    .position(|(page, sum)| page_sum(page) != *sum)
                    .map(|at| first + at)
            });
            wrong = wrong.or(bad);
            next = first + data.len() / PAGE;
            Ok(())
        })?;
        let rest = self.pages[next..]
            .iter()
            .position(|sum| *sum != 0)
            .map(|at| next + at);
        Ok(wrong
            .or(rest)
            .map(|page| format!("page {page} is not what was written")))
    }
}

/// Calls `each` with all data of a file, in order, in whole pages, at most [`CHUNK`] bytes at once.
/// Holes are left out.
pub fn for_each_data(
    file: &File,
    len: u64,
    each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0u8; CHUNK];
    let page = PAGE as u64;
    let mut at = 0;
    while at < len {
        let Some(start) = seek(file, at, libc::SEEK_DATA)? else {
            return Ok(());
        };
        let start = (start / page * page).max(at);
        let end = seek(file, start, libc::SEEK_HOLE)?
            .unwrap_or(len)
            .next_multiple_of(page);
        let end = end.min(len);
        at = start;
        while at < end {
            let size = ((end - at) as usize).min(CHUNK);
            file.read_exact_at(&mut buffer[..size], at)
                .context(|| format!("cannot read at byte {at}"))?;
            each(at, &buffer[..size])?;
            at += size as u64;
        }
    }
    Ok(())
}

/// lseek(2) with SEEK_DATA or SEEK_HOLE; None: nothing there before the end.
fn seek(file: &File, from: u64, whence: libc::c_int) -> Result<Option<u64>> {
    // SAFETY: lseek touches no memory of ours.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from as libc::off_t, whence) };
    if at >= 0 {
        return Ok(Some(at as u64));
    }
    let error = Error::last("cannot find the file's data");
    if error.cause.raw_os_error() == Some(libc::ENXIO) {
        Ok(None)
    } else {
        Err(error)
    }
}
