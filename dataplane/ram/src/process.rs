// SPDX-License-Identifier: Apache-2.0
//! Looking into another process: where its RAM is, which pages are its own, what is in them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::{Context, Error, PAGE, Result};

/// One line of `/proc/<pid>/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses.
    pub range: Range<u64>,
    /// `rw-p` and the like.
    pub mode: String,
    /// Offset into the file.
    pub offset: u64,
    /// Inode of the file; 0: none.
    pub inode: u64,
}

/// What identifies the RAM among a process's mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ram {
    /// The private mapping of this file, of this length. The device is not compared: btrfs shows
    /// another one in `maps` than in stat(2).
    File {
        /// Inode number.
        inode: u64,
        /// Bytes.
        len: u64,
    },
    /// The one writable anonymous mapping of exactly this length.
    Anonymous {
        /// Bytes.
        len: u64,
    },
}

/// Parses one line of `/proc/<pid>/maps`.
pub fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let mode = fields.next()?.to_owned();
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    (range.start < range.end).then_some(Mapping {
        range,
        mode,
        offset,
        inode,
    })
}

/// All mappings of a process, in order of address.
pub fn mappings(pid: i32) -> Result<Vec<Mapping>> {
    let path = format!("/proc/{pid}/maps");
    let file = File::open(&path).context(|| format!("cannot open {path}"))?;
    let mut found = Vec::new();
    for line in BufReader::new(file).lines() {
        let line = line.context(|| format!("cannot read {path}"))?;
        found.push(
            parse_mapping(&line)
                .ok_or_else(|| Error::new(format!("{path} has a line that makes no sense")))?,
        );
    }
    Ok(found)
}

/// Finds the RAM. The kernel may show it as several neighbouring mappings (after an `madvise` of a
/// part); they are put together.
pub fn find_ram(pid: i32, ram: Ram) -> Result<Range<u64>> {
    find_in(&mappings(pid)?, ram)
        .map_err(|why| Error::new(format!("the RAM of process {pid} cannot be told: {why}")))
}

fn find_in(mappings: &[Mapping], ram: Ram) -> std::result::Result<Range<u64>, &'static str> {
    let (inode, len) = match ram {
        Ram::File { inode, len } => (inode, len),
        Ram::Anonymous { len } => (0, len),
    };
    let ours = |m: &&Mapping| m.inode == inode && m.mode.starts_with("rw") && m.mode.ends_with('p');
    let whole = mappings.iter().filter(ours).map(|m| m.range.clone());
    // Neighbours that are not the RAM are no reason to miss it, so whole mappings come first.
    let whole: Vec<_> = whole
        .filter(|range| range.end - range.start == len)
        .collect();
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut next_offset = 0;
    for mapping in mappings.iter().filter(ours) {
        match runs.last_mut() {
            Some(run)
                if run.end == mapping.range.start
                    && (inode == 0 || mapping.offset == next_offset) =>
            {
                run.end = mapping.range.end;
            }
            _ => runs.push(mapping.range.clone()),
        }
        next_offset = mapping.offset + (mapping.range.end - mapping.range.start);
    }
    runs.retain(|run| run.end - run.start == len);
    let fitting = if whole.is_empty() { runs } else { whole };
    match fitting.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err("no mapping fits"),
        _ => Err("several mappings fit"),
    }
}

/// Identity of an open file for [`Ram::File`].
pub fn ram_file(file: &File) -> Result<Ram> {
    let meta = file
        .metadata()
        .context(|| "cannot stat the RAM file".into())?;
    Ok(Ram::File {
        inode: meta.ino(),
        len: meta.len(),
    })
}

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// `_IOWR('f', 16, struct pm_scan_arg)`, linux/fs.h; since Linux 6.7.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
const REGIONS_AT_ONCE: usize = 4096;

#[repr(C)]
#[derive(Default)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Calls `each` with every range of pages that are the process's own: in memory or in swap, not a
/// view of the file below. Ranges come in order; neighbouring ones may come apart.
pub fn private_pages(
    pid: i32,
    range: Range<u64>,
    each: &mut dyn FnMut(Range<u64>) -> Result<()>,
) -> Result<()> {
    let path = format!("/proc/{pid}/pagemap");
    let pagemap = File::open(&path).context(|| format!("cannot open {path}"))?;
    if scan(&pagemap, range.clone(), each)? {
        return Ok(());
    }
    read_pagemap(&pagemap, range, each)
}

/// By PAGEMAP_SCAN; false when the kernel does not have it.
fn scan(
    pagemap: &File,
    range: Range<u64>,
    each: &mut dyn FnMut(Range<u64>) -> Result<()>,
) -> Result<bool> {
    let mut regions = vec![PageRegion::default(); REGIONS_AT_ONCE];
    let mut start = range.start;
    while start < range.end {
        let mut arg = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            start,
            end: range.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            ..PmScanArg::default()
        };
        // SAFETY: `arg` and the vector it names are valid and of the stated sizes.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        if count < 0 {
            let error = Error::last("cannot scan the page map");
            let unknown = matches!(
                error.cause.raw_os_error(),
                Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP)
            );
            return if unknown && start == range.start {
                Ok(false)
            } else {
                Err(error)
            };
        }
        for region in regions.iter().take(count as usize) {
            each(region.start..region.end)?;
        }
        if arg.walk_end <= start {
            return Err(Error::new("the page map scan makes no progress"));
        }
        start = arg.walk_end;
    }
    Ok(true)
}

/// By reading `/proc/<pid>/pagemap`: older kernels.
fn read_pagemap(
    pagemap: &File,
    range: Range<u64>,
    each: &mut dyn FnMut(Range<u64>) -> Result<()>,
) -> Result<()> {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const FILE: u64 = 1 << 61;
    let mut entries = vec![0u8; 8 * 65536];
    let mut address = range.start;
    while address < range.end {
        let pages = ((range.end - address) as usize / PAGE).min(entries.len() / 8);
        let part = &mut entries[..pages * 8];
        pagemap
            .read_exact_at(part, address / PAGE as u64 * 8)
            .context(|| "cannot read the page map".into())?;
        let mut run: Option<u64> = None;
        for (index, entry) in part.chunks_exact(8).enumerate() {
            let entry = u64::from_le_bytes(entry.try_into().expect("eight bytes"));
            let own = entry & (PRESENT | SWAPPED) != 0 && entry & FILE == 0;
            let here = address + (index * PAGE) as u64;
            match (own, run) {
                (true, None) => run = Some(here),
                (false, Some(start)) => {
                    each(start..here)?;
                    run = None;
                }
                _ => {}
            }
        }
        let end = address + (pages * PAGE) as u64;
        if let Some(start) = run {
            each(start..end)?;
        }
        address = end;
    }
    Ok(())
}

/// Copies memory of another process, swapped pages included.
pub fn read_memory(pid: i32, address: u64, into: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < into.len() {
        let local = libc::iovec {
            iov_base: into[done..].as_mut_ptr().cast(),
            iov_len: into.len() - done,
        };
        let remote = libc::iovec {
            iov_base: (address + done as u64) as *mut libc::c_void,
            iov_len: into.len() - done,
        };
        // SAFETY: `local` describes our own exclusive buffer; the kernel checks `remote`.
        let count = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
        if count <= 0 {
            return Err(Error::last(format!("cannot read memory of process {pid}")));
        }
        done += count as usize;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Mapping {
        parse_mapping(text).expect("a line")
    }

    #[test]
    fn lines_are_read() {
        let mapping = line("7f6a1be00000-7f6a2be00000 rw-p 00001000 fd:01 77 /a file (deleted)");
        assert_eq!(mapping.range, 0x7f6a_1be0_0000..0x7f6a_2be0_0000);
        assert_eq!((mapping.offset, mapping.inode), (0x1000, 77));
        assert_eq!(parse_mapping(""), None);
        assert_eq!(parse_mapping("2-1 rw-p 0 0:0 0"), None);
    }

    /// The two ways to ask the kernel agree (where it knows the newer one).
    #[test]
    fn both_scans_find_the_same() {
        const PAGES: usize = 3000;
        let len = PAGES * PAGE;
        let mode = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, placed by the kernel.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, mode, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        // SAFETY: the mapping is ours.
        unsafe { libc::madvise(address, len, libc::MADV_NOHUGEPAGE) };
        let mut expected = Vec::new();
        for page in (0..PAGES).filter(|page| page % 7 < 3 || *page > 2000) {
            // SAFETY: inside the mapping.
            unsafe { address.cast::<u8>().add(page * PAGE).write(1) };
            expected.push(address as u64 + (page * PAGE) as u64);
        }
        let range = address as u64..(address as usize + len) as u64;
        let pagemap = File::open("/proc/self/pagemap").expect("a page map");
        let mut seen = [Vec::new(), Vec::new()];
        let known = scan(&pagemap, range.clone(), &mut |run| {
            seen[0].extend(run.step_by(PAGE));
            Ok(())
        });
        read_pagemap(&pagemap, range, &mut |run| {
            seen[1].extend(run.step_by(PAGE));
            Ok(())
        })
        .expect("read");
        if known.expect("a scan") {
            assert_eq!(seen[0], expected);
        } else {
            println!("this kernel has no PAGEMAP_SCAN");
        }
        assert_eq!(seen[1], expected);
        // SAFETY: made above.
        unsafe { libc::munmap(address, len) };
    }

    #[test]
    fn neighbours_are_one_and_doubt_is_an_error() {
        let ram = Ram::Anonymous { len: 0x2000 };
        let first = line("1000-2000 rw-p 00000000 00:00 0");
        let second = line("2000-3000 rw-p 00000000 00:00 0");
        let apart = line("5000-7000 rw-p 00000000 00:00 0");
        let no_access = line("8000-a000 ---p 00000000 00:00 0");
        let both = [first.clone(), second.clone(), no_access];
        assert_eq!(find_in(&both, ram), Ok(0x1000..0x3000));
        assert_eq!(
            find_in(&[first.clone(), second, apart.clone()], ram),
            Ok(0x5000..0x7000)
        );
        let twice = line("a000-c000 rw-p 00000000 00:00 0");
        assert!(find_in(&[apart, twice], ram).is_err());
        assert!(find_in(std::slice::from_ref(&first), ram).is_err());
        let whole = line("2000-4000 rw-p 00000000 00:00 0");
        assert_eq!(find_in(&[first, whole], ram), Ok(0x2000..0x4000));
    }

    #[test]
    fn a_file_is_known_by_its_inode_and_private_mode() {
        let ram = Ram::File {
            inode: 9,
            len: 0x1000,
        };
        let shared = line("1000-2000 rw-s 00000000 00:01 9 /ram");
        let private = line("3000-4000 rw-p 00000000 00:01 9 /ram");
        let other = line("5000-6000 rw-p 00000000 00:01 8 /ram");
        assert_eq!(
            find_in(&[shared.clone(), private, other], ram),
            Ok(0x3000..0x4000)
        );
        assert!(find_in(&[shared], ram).is_err());
    }
}
