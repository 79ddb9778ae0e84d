// SPDX-License-Identifier: Apache-2.0
//! Saves, checks and maps real memory, of this process and of a child.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

use opendsec_ram::PAGE;
use opendsec_ram::map::map_file;
use opendsec_ram::process::{Ram, find_ram, ram_file};
use opendsec_ram::save::{Base, save};
use opendsec_ram::sums::Sums;
use proptest::prelude::*;

/// A private mapping of ours, unmapped when dropped.
struct Memory {
    address: *mut u8,
    len: usize,
}

impl Memory {
    fn map(len: usize, file: Option<&File>) -> Self {
        let (flags, fd) = match file {
            Some(file) => (libc::MAP_PRIVATE, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let mode = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, placed by the kernel.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, mode, flags, fd, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        Self {
            address: address.cast(),
            len,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours and lives as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }

    fn page(&mut self, page: usize) -> &mut [u8] {
        &mut self.bytes()[page * PAGE..(page + 1) * PAGE]
    }

    /// What a guest's balloon does.
    fn give_back(&mut self, page: usize) {
        let address = self.page(page).as_mut_ptr().cast();
        // SAFETY: a page of our own mapping.
        let code = unsafe { libc::madvise(address, PAGE, libc::MADV_DONTNEED) };
        assert_eq!(code, 0);
    }

    fn range(&self) -> Range<u64> {
        let start = self.address as u64;
        start..start + self.len as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by mmap with this length.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

fn own_pid() -> i32 {
    std::process::id() as i32
}

fn saved(memory: &Memory, base: Option<(&File, Sums)>, out: &Path) -> (u64, u64, Sums) {
    let base = base.map(|(file, sums)| Base { file, sums });
    let (report, sums) = save(own_pid(), memory.range(), base, out).expect("a save");
    assert_eq!(report.total_bytes, memory.len as u64);
    (report.written_bytes, report.zero_bytes, sums)
}

#[derive(Debug, Clone)]
enum Change {
    Write(usize, u8),
    Read(usize),
    GiveBack(usize),
}

fn changes(pages: usize) -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        (0..pages, 0u8..3).prop_map(|(page, byte)| Change::Write(page, byte)),
        (0..pages).prop_map(Change::Read),
        (0..pages).prop_map(Change::GiveBack),
    ];
    prop::collection::vec(change, 0..3 * pages)
}

fn apply(memory: &mut Memory, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Write(page, byte) => memory.page(*page).fill(*byte),
            Change::Read(page) => assert!(memory.page(*page)[0] < 8),
            Change::GiveBack(page) => memory.give_back(*page),
        }
    }
}

const PAGES: usize = 400;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happens to memory over nothing and then over the saved file: each saved file holds
    /// what a reader of the memory sees, and its sums are those of its content.
    #[test]
    fn generations_are_exact(first in changes(PAGES), second in changes(PAGES), third in changes(PAGES)) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut memory = Memory::map(PAGES * PAGE, None);
        apply(&mut memory, &first);
        let path = dir.path().join("0");
        let (_, _, mut sums) = saved(&memory, None, &path);
        prop_assert!(std::fs::read(&path).expect("a file") == memory.bytes());
        let mut base = File::open(&path).expect("a file");
        for (name, changes) in [("1", &second), ("2", &third)] {
            let mut memory = Memory::map(PAGES * PAGE, Some(&base));
            apply(&mut memory, changes);
            let path = dir.path().join(name);
            let (_, _, new) = saved(&memory, Some((&base, sums)), &path);
            prop_assert!(std::fs::read(&path).expect("a file") == memory.bytes());
            base = File::open(&path).expect("a file");
            prop_assert_eq!(&Sums::of(&base).expect("sums"), &new);
            prop_assert_eq!(new.check(&base).expect("a check"), None);
            sums = new;
        }
    }

    /// No flipped byte and no cut goes unnoticed.
    #[test]
    fn damage_is_found(written in changes(PAGES), at in 0..PAGES * PAGE, flip in 1u8..=255, cut in 1..PAGES * PAGE) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut memory = Memory::map(PAGES * PAGE, None);
        apply(&mut memory, &written);
        let path = dir.path().join("ram");
        let (_, _, sums) = saved(&memory, None, &path);
        let mut content = std::fs::read(&path).expect("a file");
        content[at] ^= flip;
        let other = dir.path().join("flipped");
        std::fs::write(&other, &content).expect("written");
        prop_assert!(sums.check(&File::open(&other).expect("a file")).expect("a check").is_some());
        File::options().write(true).open(&path).and_then(|f| f.set_len(cut as u64)).expect("cut");
        prop_assert!(sums.check(&File::open(&path).expect("a file")).expect("a check").is_some());
    }
}

#[test]
fn only_private_pages_are_written_and_zeros_are_holes() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut memory = Memory::map(PAGES * PAGE, None);
    for page in 0..100 {
        memory.page(page).fill(7);
    }
    memory.page(300).fill(0);
    let path = dir.path().join("0");
    let (written, zero, sums) = saved(&memory, None, &path);
    // Huge pages may bring zero neighbours along.
    assert_eq!(written, 100 * PAGE as u64);
    assert!(zero >= PAGE as u64);

    let base = File::open(&path).expect("a file");
    let mut memory = Memory::map(PAGES * PAGE, Some(&base));
    assert_eq!(
        find_ram(own_pid(), ram_file(&base).expect("ram")).expect("found"),
        memory.range()
    );
    assert_eq!(memory.page(50)[0], 7);
    memory.page(3).fill(9);
    memory.page(4).fill(0);
    let path = dir.path().join("1");
    let (written, zero, new) = saved(&memory, Some((&base, sums)), &path);
    assert_eq!((written, zero), (PAGE as u64, PAGE as u64));
    assert_eq!((new.pages[4], new.pages[5]), (0, new.pages[6]));
}

#[test]
fn a_wrong_base_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("base");
    std::fs::write(&path, vec![1u8; PAGE]).expect("written");
    let base = File::open(&path).expect("a file");
    let sums = Sums::of(&base).expect("sums");
    let memory = Memory::map(2 * PAGE, None);
    let base = Some(Base { file: &base, sums });
    assert!(save(own_pid(), memory.range(), base, &dir.path().join("out")).is_err());
}

#[test]
fn damaged_sums_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("sums");
    Sums::zeros(4 * PAGE as u64)
        .and_then(|sums| sums.write(&path))
        .expect("written");
    let good = std::fs::read(&path).expect("read");
    for cut in 0..good.len() {
        std::fs::write(&path, &good[..cut]).expect("written");
        assert!(Sums::read(&path).is_err(), "cut to {cut}");
    }
    assert!(Sums::zeros(5).is_err());
}

/// A child with anonymous memory gets a file mapped over it while it waits in a system call, and
/// then sees the file's content, keeps its own writes to itself, and goes on as before.
#[test]
fn a_file_is_mapped_under_a_waiting_process() {
    const LEN: usize = 37 * PAGE;
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&vec![5u8; LEN]).expect("written");
    let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("opened");
    let memory = Memory::map(LEN, None);
    let mut to_child = [0; 2];
    let mut to_parent = [0; 2];
    // SAFETY: arrays of two.
    unsafe {
        assert_eq!(libc::pipe(to_child.as_mut_ptr()), 0);
        assert_eq!(libc::pipe(to_parent.as_mut_ptr()), 0);
    }
    // SAFETY: the child calls nothing that could wait for another thread's lock.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: plain system calls on memory and descriptors that are ours.
        unsafe {
            let address = memory.address;
            *address = 1;
            libc::write(to_parent[1], address.cast(), 1);
            let mut byte = 0u8;
            // It waits here when the file is mapped; the call must not be seen to fail.
            let got = libc::read(to_child[0], (&raw mut byte).cast(), 1);
            let mut good = got == 1 && byte == b'x';
            for offset in 0..LEN {
                good &= *address.add(offset) == 5;
            }
            *address.add(3) = 6;
            good &= *address.add(3) == 6;
            libc::_exit(if good { 0 } else { 1 });
        }
    }
    let mut byte = [0u8; 1];
    // SAFETY: our own descriptors and buffer.
    unsafe { assert_eq!(libc::read(to_parent[0], byte.as_mut_ptr().cast(), 1), 1) };
    let range = memory.range();
    map_file(pid, range.clone(), read_only.as_raw_fd()).expect("mapped");
    let ram = ram_file(&read_only).expect("ram");
    assert_eq!(find_ram(pid, ram).expect("found"), range);
    assert!(find_ram(pid, Ram::Anonymous { len: LEN as u64 }).is_err());
    let mut status = 0;
    // SAFETY: our own descriptors, buffer and child.
    unsafe {
        assert_eq!(libc::write(to_child[1], b"x".as_ptr().cast(), 1), 1);
        assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
    }
    assert_eq!(
        (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
        (true, 0)
    );
    let mut content = Vec::new();
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .and_then(|mut f| f.read_to_end(&mut content))
        .expect("read");
    assert!(
        content.iter().all(|byte| *byte == 5),
        "the file was written to"
    );
}

#[test]
fn a_process_that_is_gone_is_an_error() {
    assert!(map_file(i32::MAX - 1, 0..4096, 0).is_err());
    assert!(find_ram(i32::MAX - 1, Ram::Anonymous { len: 4096 }).is_err());
}
