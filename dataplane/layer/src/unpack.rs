// SPDX-License-Identifier: Apache-2.0
//! Puts an archive's files below a directory.

use std::ffi::CStr;
use std::io::BufRead;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, chownat, fchmod,
    fchown, fsetxattr, ftruncate, futimens, linkat, lsetxattr, makedev, mkdirat, mknodat, openat,
    statat, symlinkat, utimensat,
};
use rustix::io::Errno;

use crate::archive::{Archive, Entry, EntryKind, Limits};
use crate::error::{Error, Kind, Result};
use crate::root::{DIR_MODE, Root, c_name, clean, proc_path, split};
use crate::xattrs;

/// Prefix of the names by which an OCI layer says that a file of a lower layer is gone (OCI image
/// specification 1.1, "Whiteouts").
pub const WHITEOUT: &[u8] = b".wh.";
/// Name by which it says that a directory hides what lower layers have in it.
pub const OPAQUE: &[u8] = b".wh..wh..opq";

/// How to unpack.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What may come out.
    pub limits: Limits,
    /// It is a layer: names of whiteouts become what overlayfs takes for whiteouts, and directories
    /// that no entry describes have the time 0, so that the same layer always gives the same tree.
    /// Else such names are like others, and such directories are new.
    pub is_layer: bool,
    /// User and group of everything, instead of what the archive says.
    pub owner: Option<(u32, u32)>,
    /// Mode of everything but links, instead of what the archive says.
    pub mode: Option<u32>,
    /// Which extended attributes are set.
    pub attributes: Attributes,
}

/// Which extended attributes are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attributes {
    /// Those that an archive may set ([`xattrs::is_taken`]). `user.` attributes are left out where
    /// the file system has none.
    Archive,
    /// Of those, what the system allows.
    Lenient,
    /// All that are given.
    All,
}

/// What was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Length of the stream, decompressed.
    pub bytes: u64,
    /// Entries in it.
    pub entries: u64,
    /// The layer hides everything below it. Overlayfs does not heed the mark on a layer's top
    /// directory, so who stacks layers must leave out the lower ones.
    pub opaque_root: bool,
}

/// Unpacks a whole tar stream below `dir`, which should be empty and belong to nobody else.
/// Ownership and times are set; directories that no entry describes have the mode 0755 and are
/// root's, or of the owner that is given for all.
///
/// Errors: `Invalid` for archives that are damaged or mean harm; what is below `dir` is then of no
/// use.
pub fn unpack<R: BufRead>(input: R, dir: BorrowedFd<'_>, options: Options) -> Result<Report> {
    let mut archive = Archive::new(input, options.limits);
    let mut unpacker = Unpacker::new(dir, options)?;
    while let Some(entry) = archive.next_entry()? {
        unpacker.entry(&entry, |file| write(&mut archive, file, &entry))?;
    }
    archive.drain()?;
    unpacker.finish();
    Ok(Report {
        bytes: archive.taken(),
        entries: archive.entries(),
        opaque_root: unpacker.opaque_root,
    })
}

/// Puts entries below a directory.
pub struct Unpacker {
    root: Root,
    options: Options,
    /// Times of directories, set last: each new name in a directory changes its time.
    times: Vec<(Vec<u8>, (i64, u32))>,
    opaque_root: bool,
}

/// What an entry's attributes are set on.
enum Node<'a> {
    Open(BorrowedFd<'a>),
    Named(BorrowedFd<'a>, &'a CStr),
}

impl Unpacker {
    /// Below a directory, which gets the attributes that it has if no entry describes it.
    ///
    /// Errors: what the system says.
    pub fn new(dir: BorrowedFd<'_>, options: Options) -> Result<Self> {
        let (uid, gid) = options.owner.unwrap_or((0, 0));
        let root = Root::new(dir, (uid, gid))?;
        let top = root.top();
        fchown(top, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
            .and_then(|()| fchmod(top, Mode::from(DIR_MODE)))
            .map_err(|err| Error::system("cannot prepare the directory", err))?;
        Ok(Self {
            root,
            options,
            times: Vec::new(),
            opaque_root: false,
        })
    }

    /// Makes one entry; `fill` writes the content of a regular file.
    ///
    /// Errors: `Invalid` for an entry that cannot be, those of `fill`, and what the system says.
    pub fn entry(
        &mut self,
        entry: &Entry,
        fill: impl FnOnce(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        self.place(entry, fill).map_err(|err| err.at(&entry.path))
    }

    fn place(&mut self, entry: &Entry, fill: impl FnOnce(&OwnedFd) -> Result<()>) -> Result<()> {
        let path = clean(&entry.path)?;
        let Some((dir, name)) = split(&path) else {
            return self.top_entry(entry);
        };
        let parent = self.root.dir(dir)?;
        let parent = parent.as_fd();
        if self.options.is_layer {
            if name == OPAQUE {
                self.opaque_root |= dir.is_empty();
                return hide_below(parent);
            }
            if let Some(hidden) = name.strip_prefix(WHITEOUT) {
                return whiteout(parent, hidden, entry);
            }
            if entry.kind == EntryKind::CharDevice(0, 0) {
                return whiteout(parent, name, entry);
            }
        }
        let name = &*c_name(name)?;
        match entry.kind {
            EntryKind::Dir => self.dir(parent, name, &path, entry),
            EntryKind::File => {
                let file = self.replacing(parent, name, create)?;
                fill(&file)?;
                self.attributes(&Node::Open(file.as_fd()), entry)?;
                let times = times(entry.mtime);
                futimens(&file, &times).map_err(|err| Error::of_path("cannot set times", err))
            }
            EntryKind::Symlink => {
                let target = c_name(&entry.link)?;
                self.replacing(parent, name, |parent, name| {
                    symlinkat(&*target, parent, name)
                })?;
                self.special(parent, name, entry)
            }
            EntryKind::HardLink => self.hard_link(parent, name, entry),
            EntryKind::Fifo => self.node(parent, name, FileType::Fifo, (0, 0), entry),
            EntryKind::CharDevice(major, minor) => {
                let numbers = (major, minor);
                self.node(parent, name, FileType::CharacterDevice, numbers, entry)
            }
            EntryKind::BlockDevice(major, minor) => {
                let numbers = (major, minor);
                self.node(parent, name, FileType::BlockDevice, numbers, entry)
            }
        }
    }

    fn top_entry(&mut self, entry: &Entry) -> Result<()> {
        if entry.kind != EntryKind::Dir {
            return Err(Error::invalid("the top of an archive must be a directory"));
        }
        self.attributes(&Node::Open(self.root.top()), entry)?;
        self.times.push((Vec::new(), entry.mtime));
        Ok(())
    }

    /// Makes something; what stands there already goes first, as later entries win.
    fn replacing<T>(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        make: impl Fn(BorrowedFd<'_>, &CStr) -> rustix::io::Result<T>,
    ) -> Result<T> {
        let mut made = make(parent, name);
        if matches!(made, Err(Errno::EXIST)) {
            self.root.remove(parent, name)?;
            made = make(parent, name);
        }
        made.map_err(|err| Error::of_path("cannot make it", err))
    }

    /// A directory; one that is there stays, with its new attributes.
    fn dir(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        path: &[u8],
        entry: &Entry,
    ) -> Result<()> {
        let mode = Mode::from(DIR_MODE);
        let mut hides = false;
        let made = match mkdirat(parent, name, mode) {
            Err(Errno::EXIST) => match kind_of(parent, name)? {
                Standing::Dir => Ok(()),
                standing => {
                    hides = self.options.is_layer && standing == Standing::Whiteout;
                    self.root.remove(parent, name)?;
                    mkdirat(parent, name, mode)
                }
            },
            made => made,
        };
        made.map_err(|err| Error::of_path("cannot make the directory", err))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(parent, name, flags, Mode::empty())
            .map_err(|err| Error::of_path("cannot open the directory", err))?;
        if hides {
            hide_below(dir.as_fd())?;
        }
        self.attributes(&Node::Open(dir.as_fd()), entry)?;
        self.times.push((path.to_vec(), entry.mtime));
        Ok(())
    }

    fn hard_link(&mut self, parent: BorrowedFd<'_>, name: &CStr, entry: &Entry) -> Result<()> {
        let nowhere = |err| Error::of_path("a hard link to a file that is not there", err);
        let target = clean(&entry.link)?;
        let (dir, base) = split(&target).ok_or_else(|| Error::invalid("a hard link to the top"))?;
        let base = c_name(base)?;
        let dir = match dir {
            b"" => self.root.dir(b"")?,
            dir => self.root.open(dir).map_err(nowhere)?.into(),
        };
        let link = |parent: BorrowedFd<'_>, name: &CStr| {
            linkat(&dir, &*base, parent, name, AtFlags::empty())
        };
        let linked = match link(parent, name) {
            Err(Errno::EXIST) => {
                let id = |dir: BorrowedFd<'_>, name: &CStr| {
                    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
                        .map(|stat| (stat.st_dev, stat.st_ino))
                };
                if id(dir.as_fd(), &base).map_err(nowhere)? == id(parent, name).map_err(nowhere)? {
                    return Ok(());
                }
                self.root.remove(parent, name)?;
                link(parent, name)
            }
            linked => linked,
        };
        match linked {
            Err(Errno::PERM) => Err(Error::invalid("a hard link to a directory")),
            linked => linked.map_err(nowhere),
        }
    }

    fn node(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        sort: FileType,
        (major, minor): (u32, u32),
        entry: &Entry,
    ) -> Result<()> {
        let mode = Mode::from(entry.mode);
        let made = self.replacing(parent, name, |parent, name| {
            mknodat(parent, name, sort, mode, makedev(major, minor))
        });
        // Inside a sandbox even root may make no devices.
        made.map_err(|err| match err.kind {
            Kind::Other if !self.options.is_layer => {
                Error::invalid(format!("a device or pipe: {}", err.what))
            }
            _ => err,
        })?;
        self.special(parent, name, entry)
    }

    fn special(&self, parent: BorrowedFd<'_>, name: &CStr, entry: &Entry) -> Result<()> {
        self.attributes(&Node::Named(parent, name), entry)?;
        utimensat(parent, name, &times(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|err| Error::of_path("cannot set times", err))
    }

    /// Owner, then mode, then attributes: a change of the owner takes away set-user-id bits, and
    /// capabilities too.
    fn attributes(&self, node: &Node<'_>, entry: &Entry) -> Result<()> {
        let (uid, gid) = self.options.owner.unwrap_or((entry.uid, entry.gid));
        let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        if entry.uid == u32::MAX || entry.gid == u32::MAX {
            return Err(Error::invalid("an owner that no file can have"));
        }
        let mode = Mode::from(self.options.mode.unwrap_or(entry.mode));
        let done = match *node {
            Node::Open(fd) => fchown(fd, uid, gid).and_then(|()| fchmod(fd, mode)),
            Node::Named(dir, name) => {
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                let mut done = chownat(dir, name, uid, gid, flags);
                if entry.kind != EntryKind::Symlink {
                    // Not a link, and nobody else is here to make it one.
                    done =
                        done.and_then(|()| rustix::fs::chmodat(dir, name, mode, AtFlags::empty()));
                }
                done
            }
        };
        match done {
            // A user namespace has only some of them.
            Err(Errno::INVAL) => return Err(Error::invalid("an owner that does not exist here")),
            done => done.map_err(|err| Error::of_path("cannot set the owner and the mode", err))?,
        }
        for (attribute, value) in &entry.xattrs {
            if self.options.attributes == Attributes::All || xattrs::is_taken(attribute) {
                self.xattr(node, attribute, value, entry.kind)?;
            }
        }
        Ok(())
    }

    fn xattr(
        &self,
        node: &Node<'_>,
        attribute: &[u8],
        value: &[u8],
        kind: EntryKind,
    ) -> Result<()> {
        let name = c_name(attribute)?;
        let set = match *node {
            Node::Open(fd) => fsetxattr(fd, &*name, value, XattrFlags::empty()),
            Node::Named(dir, file) => {
                lsetxattr(proc_path(dir, file), &*name, value, XattrFlags::empty())
            }
        };
        // Links and devices cannot have such attributes, and some file systems have none at all.
        let special = !matches!(kind, EntryKind::File | EntryKind::Dir);
        let is_user = attribute.starts_with(b"user.");
        match set {
            Err(Errno::PERM) if is_user && special => Ok(()),
            Err(Errno::OPNOTSUPP) if is_user => Ok(()),
            Err(Errno::PERM | Errno::OPNOTSUPP)
                if self.options.attributes == Attributes::Lenient =>
            {
                Ok(())
            }
            Err(Errno::TOOBIG | Errno::RANGE | Errno::INVAL) => Err(Error::invalid(
                "an extended attribute that no file can have",
            )),
            set => set.map_err(|err| Error::of_path("cannot set an extended attribute", err)),
        }
    }

    /// Sets the times of directories. One that is gone again has none.
    pub fn finish(&mut self) {
        let mut all = Vec::new();
        if self.options.is_layer {
            all.push((Vec::new(), (0, 0)));
            all.extend(self.root.made().iter().map(|path| (path.clone(), (0, 0))));
        }
        all.append(&mut self.times);
        for (path, mtime) in all {
            let _ = match split(&path) {
                None => futimens(self.root.top(), &times(mtime)),
                Some((dir, name)) => self.set_dir_time(dir, name, mtime),
            };
        }
    }

    fn set_dir_time(
        &mut self,
        dir: &[u8],
        name: &[u8],
        mtime: (i64, u32),
    ) -> rustix::io::Result<()> {
        let parent = self.root.dir(dir).map_err(|_| Errno::NOENT)?;
        if FileType::from_raw_mode(statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
            != FileType::Directory
        {
            return Ok(());
        }
        utimensat(&parent, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// What stands at a name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Nothing,
    Dir,
    Whiteout,
    Other,
}

fn kind_of(parent: BorrowedFd<'_>, name: &CStr) -> Result<Standing> {
    let stat = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(Standing::Nothing),
        stat => stat.map_err(|err| Error::of_path("cannot look at it", err))?,
    };
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Standing::Dir,
        FileType::CharacterDevice if stat.st_rdev == 0 => Standing::Whiteout,
        _ => Standing::Other,
    })
}

/// Marks what a lower layer has at this name as gone. It concerns lower layers only: what this
/// layer itself has there stays, before or after.
fn whiteout(parent: BorrowedFd<'_>, hidden: &[u8], entry: &Entry) -> Result<()> {
    if hidden.starts_with(WHITEOUT) {
        // Notes of aufs, for itself.
        return Ok(());
    }
    if matches!(hidden, b"" | b"." | b"..") {
        return Err(Error::invalid("a whiteout of nothing"));
    }
    let name = c_name(hidden)?;
    match kind_of(parent, &name)? {
        Standing::Nothing => {}
        Standing::Dir => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let dir = openat(parent, &*name, flags, Mode::empty())
                .map_err(|err| Error::of_path("cannot open the directory", err))?;
            return hide_below(dir.as_fd());
        }
        Standing::Whiteout | Standing::Other => return Ok(()),
    }
    mknodat(parent, &*name, FileType::CharacterDevice, Mode::empty(), 0)
        .and_then(|()| {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let root = (Some(Uid::ROOT), Some(Gid::ROOT));
            chownat(parent, &*name, root.0, root.1, flags)?;
            utimensat(parent, &*name, &times(entry.mtime), flags)
        })
        .map_err(|err| Error::of_path("cannot make a whiteout", err))
}

fn hide_below(dir: BorrowedFd<'_>) -> Result<()> {
    fsetxattr(dir, xattrs::OPAQUE, b"y", XattrFlags::empty())
        .map_err(|err| Error::of_path("cannot mark a directory as opaque", err))
}

fn create(parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::RUSR | Mode::WUSR)
}

/// Writes the content of an entry of an archive to its file.
///
/// Errors: those of the archive, and what the system says.
pub fn write<R: BufRead>(archive: &mut Archive<R>, file: &OwnedFd, entry: &Entry) -> Result<()> {
    let failed = |err| Error::of_path("cannot write", err);
    let Some(pieces) = &entry.pieces else {
        return archive.read(entry.size, |piece| {
            write_all(file, piece, None).map_err(failed)
        });
    };
    for (offset, len) in pieces {
        let mut at = *offset;
        archive.read(*len, |piece| {
            write_all(file, piece, Some(at)).map_err(failed)?;
            at += piece.len() as u64;
            Ok(())
        })?;
    }
    ftruncate(file, entry.size).map_err(failed)
}

fn write_all(file: &OwnedFd, mut data: &[u8], mut at: Option<u64>) -> rustix::io::Result<()> {
    while !data.is_empty() {
        let written = match at {
            Some(offset) => rustix::io::pwrite(file, data, offset),
            None => rustix::io::write(file, data),
        };
        match written {
            Ok(0) => return Err(Errno::IO),
            Ok(len) => {
                data = &data[len..];
                at = at.map(|offset| offset + len as u64);
            }
            Err(Errno::INTR) => {}
            Err(err) => return Err(err),
        }
    }
    Ok(())
}

fn times((seconds, nanos): (i64, u32)) -> Timestamps {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(nanos),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}
