// SPDX-License-Identifier: Apache-2.0
//! Help for tests: archives that say whatever a test wants, and a directory with something beside
//! it that must not change. Tests need root: they make devices and set owners.
#![allow(dead_code)]

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use opendsec_layer::archive::Limits;
use opendsec_layer::unpack::Attributes;
use opendsec_layer::{Options, Report, Result, unpack};
use tar::{EntryType, Header};

/// An archive in the making. Nothing of what it is given is checked.
#[derive(Default)]
pub struct Tar(pub Vec<u8>);

impl Tar {
    pub fn new() -> Self {
        Self::default()
    }

    /// A header and its content; names longer than the field are cut.
    pub fn raw(mut self, header: &Header, data: &[u8]) -> Self {
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn entry(self, sort: EntryType, name: &str, link: &str, data: &[u8]) -> Self {
        let mut header = header(sort, name.as_bytes(), data.len() as u64);
        put(&mut header.as_old_mut().linkname, link.as_bytes());
        header.set_cksum();
        self.raw(&header, data)
    }

    pub fn file(self, name: &str, data: &[u8]) -> Self {
        self.entry(EntryType::Regular, name, "", data)
    }

    pub fn dir(self, name: &str) -> Self {
        self.entry(EntryType::Directory, name, "", b"")
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, name, target, b"")
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Link, name, target, b"")
    }

    pub fn device(self, name: &str, major: u32, minor: u32) -> Self {
        let mut header = header(EntryType::Char, name.as_bytes(), 0);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        header.set_cksum();
        self.raw(&header, b"")
    }

    /// A pax record for the entry that follows.
    pub fn pax(self, pairs: &[(&str, &[u8])]) -> Self {
        let mut record = Vec::new();
        for (key, value) in pairs {
            let rest = key.len() + value.len() + 3;
            let mut len = rest + 1;
            while len != rest + len.to_string().len() {
                len += 1;
            }
            write!(record, "{len} {key}=").unwrap();
            record.extend_from_slice(value);
            record.push(b'\n');
        }
        let mut header = header(EntryType::XHeader, b"pax", record.len() as u64);
        header.set_cksum();
        self.raw(&header, &record)
    }

    /// The whole archive.
    pub fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

pub fn header(sort: EntryType, name: &[u8], size: u64) -> Header {
    let mut header = Header::new_gnu();
    put(&mut header.as_old_mut().name, name);
    header.set_entry_type(sort);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000_000);
    header.set_size(size);
    header.set_cksum();
    header
}

pub fn put(field: &mut [u8], text: &[u8]) {
    let len = text.len().min(field.len());
    field[..len].copy_from_slice(&text[..len]);
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(data).unwrap();
    packed.finish().unwrap()
}

/// A directory to unpack into, and beside it one with a secret.
pub struct World {
    dir: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        std::fs::write(dir.path().join("outside/secret"), "secret").unwrap();
        Self { dir }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.root().join(path)
    }

    pub fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    pub fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.at(path)).unwrap()
    }

    pub fn unpack(&self, archive: &[u8]) -> Result<Report> {
        let limits = Limits {
            bytes_max: 64 << 20,
            entries_max: 1_000_000,
        };
        self.unpack_with(archive, layer(limits))
    }

    pub fn unpack_with(&self, archive: &[u8], options: Options) -> Result<Report> {
        let root = std::fs::File::open(self.root()).unwrap();
        unpack(archive, root.as_fd(), options)
    }

    /// Everything beside the directory is as it was.
    pub fn require_intact(&self) {
        assert_eq!(list(&self.outside()), ["secret"]);
        assert_eq!(list(self.dir.path()), ["outside", "root"]);
        let secret = self.outside().join("secret");
        assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
        let meta = std::fs::metadata(secret).unwrap();
        assert_eq!((meta.nlink(), meta.mode() & 0o7777), (1, 0o644));
        assert_eq!((meta.uid(), meta.gid()), (0, 0));
    }
}

pub fn layer(limits: Limits) -> Options {
    Options {
        limits,
        is_layer: true,
        owner: None,
        mode: None,
        attributes: Attributes::Archive,
    }
}

pub fn list(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    let len = rustix::fs::lgetxattr(path, name, &mut value[..]).ok()?;
    value.truncate(len);
    Some(value)
}

pub fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(path, name, value, flags).unwrap();
}

pub fn is_whiteout(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path)
        .is_ok_and(|meta| meta.file_type().is_char_device() && meta.rdev() == 0)
}

/// Everything below a directory: sort, mode, owner, time in seconds, names of one file, content.
pub fn describe(dir: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(path) = open.pop() {
        let full = dir.join(&path);
        let meta = std::fs::symlink_metadata(&full).unwrap();
        let content = if meta.is_file() {
            format!("{:?}", std::fs::read(&full).unwrap())
        } else if meta.is_symlink() {
            format!("{:?}", std::fs::read_link(&full).unwrap())
        } else {
            String::new()
        };
        let mut names = vec![0; 4096];
        let len = rustix::fs::llistxattr(&full, &mut names[..]).unwrap();
        let mut attributes: Vec<_> = names[..len]
            .split(|byte| *byte == 0)
            .filter(|name| !name.is_empty())
            .map(|name| String::from_utf8(name.to_vec()).unwrap())
            .map(|name| format!("{name}={:?}", xattr(&full, &name)))
            .collect();
        attributes.sort();
        let links = if meta.is_dir() { 0 } else { meta.nlink() };
        lines.push(format!(
            "{} {:o} {}:{} {} {} {links} {attributes:?} {content}",
            path.display(),
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.rdev(),
        ));
        if meta.is_dir() {
            open.extend(list(&full).into_iter().map(|name| path.join(name)));
        }
    }
    lines.sort();
    lines
}
