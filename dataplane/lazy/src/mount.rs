// SPDX-License-Identifier: Apache-2.0
//! The file system with the layer's file and its status.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEntry, ReplyOpen, Request, Session,
};

use crate::fetch::{For, Layer};
use crate::trace::Recorder;
use crate::{Error, Result, lock};

/// The layer's file.
pub const LAYER_FILE: &str = "layer.erofs";
/// The file that tells how it goes.
pub const STATUS_FILE: &str = "status";

const LAYER_INODE: INodeNo = INodeNo(2);
const STATUS_INODE: INodeNo = INodeNo(3);
/// Reads that wait for the store at once. The rest waits behind them, but what is here does not.
const WAITERS: usize = 64;
/// The layer never changes, and the kernel must know its length also when we are gone.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The file system.
#[derive(Debug)]
pub struct Served {
    layer: Arc<Layer>,
    recorder: Arc<Recorder>,
    waiting: Sender<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    at: u64,
    len: usize,
    reply: ReplyData,
}

/// Mount it at `target`. Run the session to serve it.
pub fn mount(layer: Arc<Layer>, recorder: Arc<Recorder>, target: &Path) -> Result<Session<Served>> {
    let (waiting, queue) = channel();
    let queue = Arc::new(Mutex::new(queue));
    for _ in 0..WAITERS {
        let (queue, layer) = (queue.clone(), layer.clone());
        std::thread::spawn(move || wait_for_store(&queue, &layer));
    }
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        // What is mounted from a layer's file is known by this ending.
        MountOption::FSName(target.join(LAYER_FILE).display().to_string()),
        MountOption::Subtype("opendsec-lazy".to_owned()),
        MountOption::RO,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
        MountOption::NoAtime,
        MountOption::DefaultPermissions,
    ];
    // A machine's emulator has given up root by the time it reads.
    config.acl = fuser::SessionACL::All;
    let served = Served {
        layer,
        recorder,
        waiting,
    };
    Session::new(served, target, &config).map_err(|e| Error::io("cannot mount", &e))
}

fn wait_for_store(queue: &Mutex<Receiver<Waiting>>, layer: &Layer) {
    loop {
        let next = lock(queue).recv();
        let Ok(Waiting { at, len, reply }) = next else {
            return;
        };
        match layer.ensure(layer.chunks_of(at, len as u64), For::Reader) {
            Ok(()) => answer(layer, at, len, reply),
            Err(_) => {
                layer
                    .counters
                    .reads_failed
                    .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                reply.error(Errno::EIO);
            }
        }
    }
}

fn answer(layer: &Layer, at: u64, len: usize, reply: ReplyData) {
    let mut data = vec![0; len];
    match layer.cache.read(&mut data, at) {
        Ok(()) => reply.data(&data),
        Err(_) => reply.error(Errno::EIO),
    }
}

impl Served {
    fn attr(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o500, 0),
            LAYER_INODE => (FileType::RegularFile, 0o400, self.layer.index.size),
            STATUS_INODE => (FileType::RegularFile, 0o400, 0),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: self.layer.index.chunk_bytes,
            flags: 0,
        })
    }
}

impl Filesystem for Served {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Reads of a loop device run beside each other only like this. Old kernels: one by one.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let most = u16::try_from(WAITERS).unwrap_or(u16::MAX);
        let _ = config.set_max_background(most);
        let _ = config.set_congestion_threshold(most);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = match name.to_str() {
            Some(LAYER_FILE) => LAYER_INODE,
            Some(STATUS_FILE) => STATUS_INODE,
            _ => return reply.error(Errno::ENOENT),
        };
        match self.attr(inode).filter(|_| parent == INodeNo::ROOT) {
            Some(attr) => reply.entry(&FOR_EVER, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attr(inode) {
            Some(attr) => reply.attr(&FOR_EVER, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != fuser::OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        // The status has no length: only direct reads go beyond it.
        let how = if inode == STATUS_INODE {
            FopenFlags::FOPEN_DIRECT_IO
        } else {
            FopenFlags::FOPEN_KEEP_CACHE
        };
        reply.opened(FileHandle(0), how);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        at: u64,
        len: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if inode == STATUS_INODE {
            let text = serde_json::to_vec(&self.layer.status()).unwrap_or_default();
            let from = text.len().min(usize::try_from(at).unwrap_or(usize::MAX));
            let to = text.len().min(from + len as usize);
            return reply.data(&text[from..to]);
        }
        let size = self.layer.index.size;
        let len = u64::from(len).min(size.saturating_sub(at));
        if inode != LAYER_INODE || len == 0 {
            return reply.data(&[]);
        }
        let chunks = self.layer.chunks_of(at, len);
        self.recorder.note(chunks.clone());
        let len = len as usize;
        if self.layer.has(chunks) {
            return answer(&self.layer, at, len, reply);
        }
        if let Err(lost) = self.waiting.send(Waiting { at, len, reply }) {
            lost.0.reply.error(Errno::EIO);
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        at: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (LAYER_INODE, FileType::RegularFile, LAYER_FILE),
            (STATUS_INODE, FileType::RegularFile, STATUS_FILE),
        ];
        let rest = entries
            .iter()
            .enumerate()
            .skip(usize::try_from(at).unwrap_or(usize::MAX));
        for (n, (inode, kind, name)) in rest {
            if reply.add(*inode, n as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
