// SPDX-License-Identifier: Apache-2.0
//! Reads a tree that root of a sandbox has written: an overlay's upper directory.
//!
//! Nothing in it leads elsewhere: links are not followed, other mounts are not entered, devices
//! and pipes are not opened. Each file is looked at through one descriptor, so that a name that
//! changes its meaning meanwhile changes nothing.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, getxattr, listxattr,
    major, minor, openat, openat2, readlinkat, statat,
};
use rustix::io::Errno;

use crate::archive::{Entry, EntryKind, Limits};
use crate::error::{Error, Kind, Result};
use crate::exclude::Exclude;
use crate::xattrs::{self, Upper};
use crate::{DEPTH_MAX, PATH_BYTES_MAX};

/// Largest value of an extended attribute (`XATTR_SIZE_MAX`), and of a list of names.
const XATTR_BYTES_MAX: usize = 64 * 1024;

/// One file of the tree.
pub struct Item {
    /// What it is; the path is that below the tree. A whiteout is a character device 0:0. The
    /// attributes are those that belong to the file, without marks of overlayfs.
    pub entry: Entry,
    /// The directory hides what lower layers have in it.
    pub is_opaque: bool,
    /// Content of a regular file.
    pub file: Option<File>,
}

/// The tree.
pub struct Source {
    top: OwnedFd,
    exclude: Exclude,
    scrub: Exclude,
    limits: Limits,
    entries: u64,
    content: u64,
    /// Files with several names, by device and inode: the name that came first.
    links: HashMap<(u64, u64), Vec<u8>>,
}

/// A directory on the way: its path, and the names in it that are still to come, last first.
struct Level {
    path: Vec<u8>,
    names: Vec<CString>,
}

impl Source {
    /// Of an open directory. What `exclude` hits is as if it were not there; what `scrub` hits is
    /// left out too, but for whiteouts: what was deleted does not come back from a lower layer.
    ///
    /// Errors: what the system says.
    pub fn new(dir: &File, exclude: Exclude, scrub: Exclude, limits: Limits) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = openat(dir, c".", flags, Mode::empty())
            .map_err(|err| Error::system("cannot open the directory", err))?;
        Ok(Self {
            top,
            exclude,
            scrub,
            limits,
            entries: 0,
            content: 0,
            links: HashMap::new(),
        })
    }

    /// Bytes of all files so far, holes counted.
    pub fn content(&self) -> u64 {
        self.content
    }

    /// Files so far.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Goes over the whole tree, each directory before what is in it, names in the order of their
    /// bytes. The top comes first, with an empty path.
    ///
    /// Errors: `Invalid` for what no layer can hold, `Limit`, what the system says, and those of
    /// `visit`.
    pub fn walk(&mut self, mut visit: impl FnMut(Item) -> Result<()>) -> Result<()> {
        let top = self.open(b"")?;
        let top = self.item(Vec::new(), c".", &top)?;
        if let Some(top) = top {
            visit(top)?;
        }
        let mut levels = vec![self.level(Vec::new())?];
        let mut parent: Option<(Vec<u8>, OwnedFd)> = None;
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.pop() else {
                levels.pop();
                continue;
            };
            let mut path = level.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            if self.exclude.hits(&path) {
                continue;
            }
            let too_deep = path.iter().filter(|byte| **byte == b'/').count() >= DEPTH_MAX;
            if too_deep || path.len() > PATH_BYTES_MAX {
                let what = "a path that is too long or too deep for a layer";
                return Err(Error::invalid(what).at(&path));
            }
            if parent
                .as_ref()
                .is_none_or(|(known, _)| *known != level.path)
            {
                parent = Some((level.path.clone(), self.open(&level.path)?));
            }
            let Some((_, dir)) = &parent else { break };
            if self.scrub.hits(&path) && !is_whiteout(dir, &name).map_err(|err| err.at(&path))? {
                continue;
            }
            let Some(item) = self.item(path.clone(), &name, dir)? else {
                continue;
            };
            let is_dir = item.entry.kind == EntryKind::Dir;
            visit(item).map_err(|err| err.at(&path))?;
            if is_dir {
                levels.push(self.level(path)?);
            }
        }
        Ok(())
    }

    fn open(&self, path: &[u8]) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let path = if path.is_empty() { b"." } else { path };
        openat2(&self.top, path, flags, Mode::empty(), within)
            .map_err(|err| Error::of_path("cannot open the directory", err).at(path))
    }

    fn level(&self, path: Vec<u8>) -> Result<Level> {
        let failed = |err| Error::of_path("cannot list the directory", err).at(&path);
        let mut names = Vec::new();
        let listed = Dir::new(self.open(&path)?).map_err(failed)?;
        for entry in listed {
            let entry = entry.map_err(failed)?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
            if names.len() as u64 > self.limits.entries_max {
                return Err(self.too_many());
            }
        }
        names.sort_unstable_by(|one, other| other.cmp(one));
        Ok(Level { path, names })
    }

    fn too_many(&self) -> Error {
        Error::new(
            Kind::Limit,
            format!("more than {} entries", self.limits.entries_max),
        )
    }

    /// Looks at one file. `None` for sockets: they mean nothing without who listens.
    fn item(&mut self, path: Vec<u8>, name: &CStr, dir: &OwnedFd) -> Result<Option<Item>> {
        let failed = |err| Error::of_path("cannot look at it", err).at(&path);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let node = openat(dir, name, flags, Mode::empty()).map_err(failed)?;
        let stat = fstat(&node).map_err(failed)?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Dir,
            FileType::Symlink => EntryKind::Symlink,
            FileType::Fifo => EntryKind::Fifo,
            FileType::CharacterDevice => {
                EntryKind::CharDevice(major(stat.st_rdev), minor(stat.st_rdev))
            }
            FileType::BlockDevice => {
                EntryKind::BlockDevice(major(stat.st_rdev), minor(stat.st_rdev))
            }
            _ => return Ok(None),
        };
        self.entries += 1;
        if self.entries > self.limits.entries_max {
            return Err(self.too_many());
        }
        let mut item = Item {
            entry: entry(path, kind, &stat),
            is_opaque: false,
            file: None,
        };
        self.attributes(&mut item, &node)
            .map_err(|err| err.at(&item.entry.path))?;
        if kind == EntryKind::Symlink {
            let target = readlinkat(&node, c"", Vec::new());
            item.entry.link = target.map_err(failed_at(&item))?.into_bytes();
        }
        if kind != EntryKind::Dir && kind != EntryKind::CharDevice(0, 0) && stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                item.entry.kind = EntryKind::HardLink;
                item.entry.link = first.clone();
                item.entry.size = 0;
                item.entry.xattrs.clear();
                return Ok(Some(item));
            }
            let id = (stat.st_dev, stat.st_ino);
            self.links.insert(id, item.entry.path.clone());
        }
        if kind == EntryKind::File {
            self.content = self.content.saturating_add(item.entry.size);
            if self.content > self.limits.bytes_max {
                let what = format!("more than {} bytes of files", self.limits.bytes_max);
                return Err(Error::new(Kind::Limit, what).at(&item.entry.path));
            }
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let opened = openat(CWD, itself(&node), flags, Mode::empty());
            item.file = Some(opened.map_err(failed_at(&item))?.into());
        }
        Ok(Some(item))
    }

    fn attributes(&self, item: &mut Item, node: &OwnedFd) -> Result<()> {
        let failed = |err| Error::of_path("cannot read extended attributes", err);
        let node = itself(node);
        let mut names = vec![0; XATTR_BYTES_MAX];
        let len = match listxattr(&node, &mut names[..]) {
            Err(Errno::OPNOTSUPP) => 0,
            len => len.map_err(failed)?,
        };
        for name in names[..len].split(|byte| *byte == 0) {
            if name.is_empty() {
                continue;
            }
            let meaning = xattrs::of_upper(name);
            if meaning == Upper::Dropped {
                continue;
            }
            if meaning == Upper::Refused {
                let name = String::from_utf8_lossy(name);
                return Err(Error::invalid(format!(
                    "it has {name}: its content lies in another layer. Mount the overlay with \
                     redirect_dir=off,metacopy=off"
                )));
            }
            let mut value = vec![0; XATTR_BYTES_MAX];
            let len = getxattr(&node, name, &mut value[..]).map_err(failed)?;
            value.truncate(len);
            if meaning == Upper::Opaque {
                item.is_opaque = value == b"y";
            } else {
                item.entry.xattrs.push((name.to_vec(), value));
            }
        }
        item.entry.xattrs.sort();
        Ok(())
    }
}

fn is_whiteout(dir: &OwnedFd, name: &CStr) -> Result<bool> {
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|err| Error::of_path("cannot look at it", err))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    Ok(kind == FileType::CharacterDevice && stat.st_rdev == 0)
}

fn entry(path: Vec<u8>, kind: EntryKind, stat: &Stat) -> Entry {
    Entry {
        path,
        link: Vec::new(),
        kind,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (
            stat.st_mtime,
            u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        ),
        xattrs: Vec::new(),
        size: if kind == EntryKind::File {
            u64::try_from(stat.st_size).unwrap_or(0)
        } else {
            0
        },
        pieces: None,
    }
}

fn failed_at(item: &Item) -> impl Fn(Errno) -> Error {
    move |err| Error::of_path("cannot read it", err).at(&item.entry.path)
}

/// A path that means what a descriptor of `O_PATH` means.
fn itself(node: &OwnedFd) -> CString {
    CString::new(format!("/proc/self/fd/{}", node.as_raw_fd())).unwrap_or_default()
}
