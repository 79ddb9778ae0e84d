// SPDX-License-Identifier: Apache-2.0
//! A directory that nothing gets out of: every path is resolved below it, as if it were the root.
//!
//! Symbolic links on the way are followed, within the directory only (openat2(2),
//! `RESOLVE_IN_ROOT`). Where the kernel has no openat2 (before 5.6, or in a sandbox that forbids
//! it), a path that leads over a symbolic link is refused.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, fchown, mkdirat, openat,
    openat2, readlinkat, statat, unlinkat,
};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::{DEPTH_MAX, NAME_BYTES_MAX, PATH_BYTES_MAX};

/// Mode of directories that are made on the way to an entry and that no entry describes.
pub const DIR_MODE: u32 = 0o755;
const DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A path of an archive as parts below the root, joined by `/`; empty for the root itself.
/// Leading slashes and `.` are dropped.
///
/// Errors: `Invalid` for `..`, NUL bytes and names or paths that are too long.
pub fn clean(path: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(path.len());
    let mut depth = 0;
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => continue,
            b".." => return Err(Error::invalid("a path with '..'").at(path)),
            _ => {}
        }
        if part.len() > NAME_BYTES_MAX {
            let what = format!(
                "a name of {} bytes; {NAME_BYTES_MAX} are the most",
                part.len()
            );
            return Err(Error::invalid(what).at(path));
        }
        if part.contains(&0) {
            return Err(Error::invalid("a path with a NUL byte").at(path));
        }
        depth += 1;
        if !out.is_empty() {
            out.push(b'/');
        }
        out.extend_from_slice(part);
    }
    if depth > DEPTH_MAX {
        let what = format!("{depth} directories inside one another; {DEPTH_MAX} are the most");
        return Err(Error::invalid(what));
    }
    if out.len() > PATH_BYTES_MAX {
        let what = format!(
            "a path of {} bytes; {PATH_BYTES_MAX} are the most",
            out.len()
        );
        return Err(Error::invalid(what).at(path));
    }
    Ok(out)
}

/// The directory and the name of a clean path; `None` for the root.
pub fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    Some(match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    })
}

/// A name for the kernel. Clean paths hold no NUL byte.
pub fn c_name(name: &[u8]) -> Result<CString> {
    CString::new(name).map_err(|_| Error::invalid("a path with a NUL byte").at(name))
}

/// The directory.
pub struct Root {
    dir: Rc<OwnedFd>,
    /// The directory that was asked for last. Archives go directory by directory.
    last: Option<(Vec<u8>, Rc<OwnedFd>)>,
    /// Directories made on the way to others.
    made: Vec<Vec<u8>>,
    /// User and group of those.
    owner: (u32, u32),
}

impl Root {
    /// Below an open directory. Directories that are made on the way belong to `owner`.
    ///
    /// Errors: what the system says.
    pub fn new(dir: BorrowedFd<'_>, owner: (u32, u32)) -> Result<Self> {
        // Opened anew: a descriptor of `O_PATH` will do.
        let opened = openat(dir, c".", DIR_FLAGS, Mode::empty())
            .map_err(|err| Error::system("cannot open the directory", err))?;
        Ok(Self {
            dir: Rc::new(opened),
            last: None,
            made: Vec::new(),
            owner,
        })
    }

    /// The root directory itself.
    pub fn top(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// Opens the directory of a clean path; makes what is missing.
    ///
    /// Errors: `Invalid` if something on the way is no directory, or a link to nothing.
    pub fn dir(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>> {
        if path.is_empty() {
            return Ok(Rc::clone(&self.dir));
        }
        if let Some((known, dir)) = &self.last
            && known == path
        {
            return Ok(Rc::clone(dir));
        }
        let opened = match self.open(path) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => self.make(path)?,
            Err(err) => return Err(on_the_way(err).at(path)),
        };
        let opened = Rc::new(opened);
        self.last = Some((path.to_vec(), Rc::clone(&opened)));
        Ok(opened)
    }

    /// Opens the directory of a clean path if it is there.
    ///
    /// Errors: what the kernel says.
    pub fn open(&self, path: &[u8]) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let straight = within | ResolveFlags::NO_SYMLINKS;
        match openat2(&*self.dir, path, flags, Mode::empty(), straight) {
            Err(Errno::LOOP) => {
                let dir = openat2(&*self.dir, path, flags, Mode::empty(), within)?;
                self.require_short(&dir)?;
                Ok(dir)
            }
            // Docker's filter of old answers EPERM.
            Err(Errno::NOSYS | Errno::PERM) => self.walk(path),
            other => other,
        }
    }

    /// Links can make a path far longer and deeper than it looks; a tree that no call can name could
    /// hardly be removed again.
    fn require_short(&self, dir: &OwnedFd) -> rustix::io::Result<()> {
        let real = |fd: &OwnedFd| {
            let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let path = readlinkat(CWD, link, Vec::new())?.into_bytes();
            let depth = path.iter().filter(|byte| **byte == b'/').count();
            Ok::<_, Errno>((path.len(), depth))
        };
        let (top, at) = (real(&self.dir)?, real(dir)?);
        if at.0 > top.0 + PATH_BYTES_MAX - NAME_BYTES_MAX || at.1 > top.1 + DEPTH_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        Ok(())
    }

    fn walk(&self, path: &[u8]) -> rustix::io::Result<OwnedFd> {
        let mut at = openat(&*self.dir, c".", DIR_FLAGS, Mode::empty())?;
        for part in path.split(|byte| *byte == b'/') {
            at = openat(&at, part, DIR_FLAGS, Mode::empty())?;
        }
        Ok(at)
    }

    /// The directories that were made on the way to others.
    pub fn made(&self) -> &[Vec<u8>] {
        &self.made
    }

    fn make(&mut self, path: &[u8]) -> Result<OwnedFd> {
        let mut at: Option<OwnedFd> = None;
        let mut end = 0;
        while end < path.len() {
            let begin = if end == 0 { 0 } else { end + 1 };
            end = path[begin..]
                .iter()
                .position(|byte| *byte == b'/')
                .map_or(path.len(), |next| begin + next);
            at = Some(match self.open(&path[..end]) {
                Ok(dir) => dir,
                Err(Errno::NOENT) => {
                    let parent = at.as_ref().unwrap_or(&self.dir);
                    match mkdirat(parent, &path[begin..end], Mode::from(DIR_MODE)) {
                        Ok(()) => {}
                        Err(Errno::EXIST) => {
                            let what = "a directory of this path is a link to nothing";
                            return Err(Error::invalid(what).at(&path[..end]));
                        }
                        Err(err) => {
                            return Err(Error::of_path("cannot make a directory", err).at(path));
                        }
                    }
                    self.made.push(path[..end].to_vec());
                    let dir = self.open(&path[..end]);
                    let dir = dir.map_err(|err| on_the_way(err).at(path))?;
                    // A host's umask, or a parent that hands its group down, must not show.
                    tidy(&dir, self.owner)
                        .map_err(|err| Error::of_path("cannot set a mode", err).at(path))?;
                    dir
                }
                Err(err) => return Err(on_the_way(err).at(path)),
            });
        }
        at.ok_or_else(|| Error::invalid("an empty path"))
    }

    /// Removes what stands at a name, with everything below it.
    ///
    /// Errors: what the system says.
    pub fn remove(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<()> {
        // What is remembered may go with it.
        self.last = None;
        match unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(err) => return Err(Error::of_path("cannot replace", err)),
        }
        remove_tree(parent, name).map_err(|err| Error::of_path("cannot replace a directory", err))
    }
}

fn tidy(dir: &OwnedFd, (uid, gid): (u32, u32)) -> rustix::io::Result<()> {
    fchown(dir, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    rustix::fs::fchmod(dir, Mode::from(DIR_MODE))
}

fn on_the_way(err: Errno) -> Error {
    Error::of_path("a directory of this path cannot be entered", err)
}

/// Removes a directory with everything below it, without recursion.
///
/// Errors: what the kernel says.
pub fn remove_tree(parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<()> {
    let mut open = vec![(
        openat(parent, name, DIR_FLAGS, Mode::empty())?,
        name.to_owned(),
    )];
    while let Some((dir, _)) = open.last() {
        let mut inner = None;
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let child = entry.file_name();
            if matches!(child.to_bytes(), b"." | b"..") {
                continue;
            }
            if is_dir(dir.as_fd(), child, entry.file_type())? {
                inner = Some(child.to_owned());
                break;
            }
            unlinkat(dir, child, AtFlags::empty())?;
        }
        if let Some(child) = inner {
            let opened = openat(dir, &child, DIR_FLAGS, Mode::empty())?;
            open.push((opened, child));
            continue;
        }
        let Some((_, name)) = open.pop() else { break };
        let above = open.last().map_or(parent, |(dir, _)| dir.as_fd());
        match unlinkat(above, &name, AtFlags::REMOVEDIR) {
            // Some file systems skip names in a listing while others are removed.
            Err(Errno::NOTEMPTY) => {
                let again = openat(above, &name, DIR_FLAGS, Mode::empty())?;
                open.push((again, name));
            }
            other => other?,
        }
    }
    Ok(())
}

fn is_dir(dir: BorrowedFd<'_>, name: &CStr, known: FileType) -> rustix::io::Result<bool> {
    if known != FileType::Unknown {
        return Ok(known == FileType::Directory);
    }
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// A path by which a call that takes no directory can name an entry without following it.
pub fn proc_path(dir: BorrowedFd<'_>, name: &CStr) -> CString {
    let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
    path.extend_from_slice(std::ffi::OsStr::from_bytes(name.to_bytes()).as_bytes());
    CString::new(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_paths() {
        let same = |path: &str| String::from_utf8(clean(path.as_bytes()).unwrap()).unwrap();
        assert_eq!(same("./a//b/./c/"), "a/b/c");
        assert_eq!(same("/etc/passwd"), "etc/passwd");
        assert_eq!(same("./"), "");
        assert_eq!(same("a..b/..c"), "a..b/..c");
        for bad in ["../a", "a/../b", "a/..", "a\0b"] {
            assert!(clean(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(clean(&[b'n'; 255]).is_ok());
        assert!(clean(&[b'n'; 256]).is_err());
        assert!(clean("a/".repeat(512).as_bytes()).is_ok());
        assert!(clean("a/".repeat(513).as_bytes()).is_err());
        let long = format!("{}/", "n".repeat(255));
        assert!(clean(long.repeat(15).as_bytes()).is_ok());
        assert!(clean(long.repeat(17).as_bytes()).is_err());
        assert_eq!(split(b"a/b/c"), Some((&b"a/b"[..], &b"c"[..])));
        assert_eq!(split(b"a"), Some((&b""[..], &b"a"[..])));
        assert_eq!(split(b""), None);
    }
}
