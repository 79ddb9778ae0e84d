// SPDX-License-Identifier: Apache-2.0
//! Writing an uploaded file so that a broken upload leaves no half file.
//!
//! A new file is written where it belongs and removed if the upload breaks off. Watchers of the
//! directory see three events, in this order: created, owner set, written. A file that exists
//! keeps its place, links and watchers, so it is written in place too, but only when the whole
//! content is here and room for it is set aside.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate};
use rustix::io::Errno;

use super::FileError;
use crate::fs::metadata::{self, Metadata};
use crate::limits::FILE_CHUNK_BYTES;
use crate::paths;

/// Mode of new files before the umask, which makes 0644 of it.
const FILE_MODE: u32 = 0o666;
/// Where a large replacement waits if the file's own directory cannot take it.
const SPOOL_DIRS: [&str; 3] = ["/var/tmp", "/tmp", "/"];

enum Target {
    /// Did not exist; goes again if the upload breaks off.
    New(File),
    /// A device; there is nothing to protect.
    Device(File),
    /// Exists; its new content waits here.
    Existing(Spool),
    /// Done, or given up.
    Closed,
}

enum Spool {
    Memory(Vec<u8>),
    Disk(File),
}

/// A file that is being uploaded. Dropped before `finish`, it undoes what it did.
pub struct Sink {
    path: PathBuf,
    uid: u32,
    gid: u32,
    target: Target,
}

impl Sink {
    /// Begins a file; makes its directories.
    ///
    /// Errors: 400 for a directory or a special file, 507 for a full disk, else as the system says.
    pub fn open(path: &str, uid: u32, gid: u32) -> Result<Self, FileError> {
        let io = |what: &str, err: io::Error| FileError::from_io(&format!("{what} '{path}'"), &err);
        paths::ensure_dirs(&paths::parent(path), uid, gid)
            .map_err(|err| io("error ensuring directories of", err))?;
        let target = match fs::metadata(path) {
            Ok(meta) if meta.is_dir() => {
                return Err(FileError::bad(format!("path is a directory: {path}")));
            }
            Ok(meta) if meta.is_file() => Target::Existing(Spool::Memory(Vec::new())),
            Ok(meta) if meta.file_type().is_char_device() => {
                let opened = OpenOptions::new()
                    .write(true)
                    .custom_flags(libc::O_NONBLOCK)
                    .open(path);
                Target::Device(opened.map_err(|err| io("error opening file", err))?)
            }
            Ok(_) => {
                return Err(FileError::bad(format!(
                    "path is not a regular file: {path}"
                )));
            }
            Err(err) if err.kind() == io::ErrorKind::NotFound => {
                let file = OpenOptions::new()
                    .write(true)
                    .create(true)
                    .mode(FILE_MODE)
                    .open(path);
                Target::New(file.map_err(|err| io("error opening file", err))?)
            }
            Err(err) => return Err(io("error getting file info of", err)),
        };
        let sink = Self {
            path: PathBuf::from(path),
            uid,
            gid,
            target,
        };
        if let Target::New(file) = &sink.target {
            fchown(file, Some(uid), Some(gid)).map_err(|err| io("error changing owner of", err))?;
        }
        Ok(sink)
    }

    /// Takes a piece of content.
    ///
    /// Errors: what the disk says.
    pub fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match &mut self.target {
            Target::New(file) | Target::Device(file) => file.write_all(data),
            Target::Existing(spool) => {
                if let Spool::Memory(held) = spool {
                    if held.len() + data.len() <= FILE_CHUNK_BYTES {
                        held.extend_from_slice(data);
                        return Ok(());
                    }
                    let mut disk = spool_file(&self.path)?;
                    disk.write_all(held)?;
                    *spool = Spool::Disk(disk);
                }
                match spool {
                    Spool::Disk(disk) => disk.write_all(data),
                    Spool::Memory(_) => Ok(()),
                }
            }
            Target::Closed => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Ends the file and sets its metadata.
    ///
    /// Errors: as the system says; then the file is as it was before.
    pub fn finish(mut self, metadata: &Metadata) -> io::Result<()> {
        match &mut self.target {
            Target::New(file) | Target::Device(file) => metadata::replace(&*file, metadata)?,
            Target::Existing(spool) => {
                let file = OpenOptions::new().write(true).open(&self.path)?;
                fchown(&file, Some(self.uid), Some(self.gid))?;
                overwrite(file, spool, metadata)?;
            }
            Target::Closed => {}
        }
        self.target = Target::Closed;
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Target::New(_) = self.target {
            // The path may lead through a symlink: what was made is where it leads.
            let made = fs::canonicalize(&self.path);
            let _ = fs::remove_file(made.as_deref().unwrap_or(&self.path));
        }
    }
}

fn overwrite(mut file: File, spool: &mut Spool, metadata: &Metadata) -> io::Result<()> {
    let length = match spool {
        Spool::Memory(held) => held.len() as u64,
        Spool::Disk(disk) => {
            disk.rewind()?;
            disk.metadata()?.len()
        }
    };
    // Set room aside first: on a full disk the old content must not be cut before it shows.
    if length > file.metadata()?.len() {
        match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, length) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(err) => return Err(err.into()),
        }
    }
    metadata::replace(&file, metadata)?;
    file.set_len(0)?;
    match spool {
        Spool::Memory(held) => file.write_all(held),
        // std copies this inside the kernel.
        Spool::Disk(disk) => io::copy(disk, &mut file).map(drop),
    }
}

/// A file without a name; watchers do not see it, and it goes with its descriptor.
fn spool_file(beside: &Path) -> io::Result<File> {
    let own = beside.parent().unwrap_or(Path::new("/"));
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for dir in std::iter::once(own).chain(SPOOL_DIRS.iter().map(Path::new)) {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => return Ok(fd.into()),
            Err(err) => last = err.into(),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn ids() -> (u32, u32) {
        (
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        )
    }

    fn open(path: &Path) -> Result<Sink, FileError> {
        let (uid, gid) = ids();
        Sink::open(path.to_str().unwrap(), uid, gid)
    }

    #[test]
    fn new_files_stay_or_go() {
        let dir = crate::testing::TempDir::new();
        let path = dir.path().join("a/b/f");
        let mut sink = open(&path).unwrap();
        sink.write(b"half").unwrap();
        assert!(path.exists());
        drop(sink);
        assert!(!path.exists());
        let mut sink = open(&path).unwrap();
        sink.write(b"whole").unwrap();
        sink.finish(&Metadata::new()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
    }

    #[test]
    fn existing_files_change_only_at_the_end() {
        let dir = crate::testing::TempDir::new();
        let path = dir.path().join("f");
        let long = vec![7; FILE_CHUNK_BYTES + 5];
        for content in [&b"short"[..], &long[..], &b""[..]] {
            fs::write(&path, "good old content").unwrap();
            let mut sink = open(&path).unwrap();
            sink.write(content).unwrap();
            sink.write(b"!").unwrap();
            drop(sink);
            assert_eq!(fs::read(&path).unwrap(), b"good old content");
            let mut sink = open(&path).unwrap();
            sink.write(content).unwrap();
            sink.write(b"!").unwrap();
            sink.finish(&Metadata::new()).unwrap();
            assert_eq!(fs::read(&path).unwrap(), [content, b"!"].concat());
        }
    }

    #[test]
    fn what_cannot_be_written() {
        let dir = crate::testing::TempDir::new();
        assert!(open(dir.path()).is_err());
        fs::write(dir.path().join("f"), "").unwrap();
        assert!(open(&dir.path().join("f/g")).is_err());
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            Mode::RWXU,
            0,
        )
        .unwrap();
        assert!(open(&pipe).is_err());
        symlink("made", dir.path().join("link")).unwrap();
        drop(open(&dir.path().join("link")).unwrap());
        assert!(!dir.path().join("made").exists());
        assert!(dir.path().join("link").is_symlink());
    }
}
