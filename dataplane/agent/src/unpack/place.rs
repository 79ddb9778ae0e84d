// SPDX-License-Identifier: Apache-2.0
//! From an archive to where its files belong, so that a damaged archive leaves nothing.
//!
//! What is wanted of the archive is unpacked into a directory beside its place, which nobody else
//! can enter. When all is there, and nothing stands in its way, it is moved.

use std::ffi::{CString, OsStr};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use hyper::StatusCode;
use opendsec_layer::archive::{Archive, Entry, EntryKind, Limits};
use opendsec_layer::root::{clean, remove_tree};
use opendsec_layer::unpack::{Attributes, Options, Unpacker, write};
use opendsec_layer::{Error, Kind};

use super::input::Body;
use super::sources::{Part, Sources};
use crate::files::FileError;
use crate::fs::copy::move_by_copy;
use crate::limits::PATH_BYTES_MAX;
use crate::paths;
use crate::users::Owner;

/// Below the staging directory: where the parts of the archive go, each by its number.
const INNER: &str = "in";

/// What is copied, and where to.
pub struct Copy {
    sources: Sources,
    target: String,
    owner: Owner,
    mode: Option<u32>,
}

/// What was copied.
#[derive(Debug, PartialEq, Eq)]
pub struct Report {
    /// Files, directories and links.
    pub entries: u64,
    /// Length of the files.
    pub bytes: u64,
}

impl Copy {
    /// Checks the paths.
    ///
    /// Errors: 400 for a source with `..`, and a target that is not absolute.
    pub fn new<'a>(
        sources: impl Iterator<Item = &'a str>,
        target: String,
        owner: Owner,
        mode: Option<u32>,
    ) -> Result<Self, FileError> {
        let sources = Sources::new(sources).map_err(refusal)?;
        if !target.starts_with('/') || target.contains('\0') || target.len() >= PATH_BYTES_MAX {
            return Err(FileError::bad(format!("'{target}' is no absolute path")));
        }
        Ok(Self {
            sources,
            target,
            owner,
            mode,
        })
    }

    /// Where a part goes. Into the target if that is a directory, or gets several things; else it
    /// becomes the target. Of directories it is their content that goes there.
    fn target_of(&self, part: &Part, is_dir: bool) -> PathBuf {
        let target = &self.target;
        let is_into = || self.sources.are_several() || Path::new(target).is_dir();
        if is_dir || !(target.ends_with('/') || is_into()) {
            return PathBuf::from(paths::clean(target));
        }
        let name = part.path.rsplit(|byte| *byte == b'/').next();
        PathBuf::from(paths::clean(target)).join(OsStr::from_bytes(name.unwrap_or_default()))
    }

    fn ids(&self) -> (u32, u32) {
        (self.owner.uid, self.owner.gid)
    }
}

/// Unpacks a body and puts what is wanted of it in its place. Blocks.
///
/// Errors: 400 for a damaged archive, for one without the source, and for a target that cannot
/// take it; 507 for a full disk. Then nothing has changed, unless moving itself failed half-way.
pub fn unpack(body: Body, copy: &mut Copy) -> Result<Report, FileError> {
    let staging = Staging::new(&beside(&copy.target)?)?;
    let inner = staging.0.join(INNER);
    let report = fill(body, copy, &inner)?;
    if let Some(source) = copy.sources.missing() {
        let what = format!("there is no '{source}' in the archive");
        return Err(FileError::bad(what));
    }
    let mut moves = Vec::new();
    for (number, part) in copy.sources.parts() {
        let from = inner.join(number.to_string());
        let is_dir = fs::symlink_metadata(&from)
            .map_err(|err| FileError::from_io("looking at what was unpacked", &err))?
            .is_dir();
        let to = copy.target_of(part, is_dir);
        place(&from, &to, Step::Check)?;
        moves.push((from, to));
    }
    let (uid, gid) = copy.ids();
    let mut ready: Option<&Path> = None;
    for (from, to) in &moves {
        if let Some(parent) = to.parent().filter(|parent| ready != Some(parent)) {
            let shown = parent.to_string_lossy();
            paths::ensure_dirs(&shown, uid, gid)
                .map_err(|err| FileError::from_io(&format!("making '{shown}'"), &err))?;
            ready = Some(parent);
        }
        place(from, to, Step::Move)?;
    }
    Ok(report)
}

/// The lowest directory on the way to a path that is there.
fn beside(target: &str) -> Result<PathBuf, FileError> {
    let mut at = PathBuf::from(paths::clean(target));
    let mut is_target = true;
    loop {
        match fs::metadata(&at) {
            Ok(meta) if meta.is_dir() => return Ok(at),
            Ok(_) if is_target => {}
            Ok(_) => {
                let what = format!("'{}' is no directory", at.display());
                return Err(FileError::bad(what));
            }
            Err(err) if err.kind() == ErrorKind::NotFound => {}
            Err(err) if err.kind() == ErrorKind::NotADirectory => {}
            Err(err) => return Err(FileError::from_io(&at.display().to_string(), &err)),
        }
        is_target = false;
        if !at.pop() {
            return Err(FileError::bad("the sandbox has no root"));
        }
    }
}

/// Unpacks what is wanted below a new directory.
fn fill(body: Body, copy: &mut Copy, inner: &Path) -> Result<Report, FileError> {
    let opened = fs::create_dir(inner).and_then(|()| File::open(inner));
    let dir = opened.map_err(|err| FileError::from_io("making a directory", &err))?;
    let limits = Limits {
        bytes_max: u64::MAX,
        entries_max: u64::MAX,
    };
    let options = Options {
        limits,
        is_layer: false,
        owner: Some(copy.ids()),
        mode: copy.mode,
        attributes: Attributes::Lenient,
    };
    let input = body.decompressed();
    let input = input.map_err(|err| refusal(Error::of_input(&err)))?;
    let mut archive = Archive::new(input, limits);
    let mut unpacker = Unpacker::new(dir.as_fd(), options).map_err(refusal)?;
    let mut report = Report {
        entries: 0,
        bytes: 0,
    };
    while let Some(mut entry) = archive.next_entry().map_err(refusal)? {
        let path = clean(&entry.path).map_err(refusal)?;
        let places = copy.sources.staged(&path).map_err(refusal)?;
        let Some(first) = places.first() else {
            continue;
        };
        report.entries += 1;
        if entry.kind == EntryKind::File {
            report.bytes += entry.size;
        }
        let links = match entry.kind {
            EntryKind::HardLink => linked(&entry, &copy.sources).map_err(refusal)?,
            _ => Vec::new(),
        };
        let written = inner.join(OsStr::from_bytes(first));
        for (index, place) in places.iter().enumerate() {
            entry.path.clone_from(place);
            if let Some(link) = links.get(index).or(links.first()) {
                entry.link.clone_from(link);
            }
            let made = if index == 0 {
                unpacker.entry(&entry, |file| write(&mut archive, file, &entry))
            } else {
                unpacker.entry(&entry, |file| copy_content(&written, file))
            };
            made.map_err(refusal)?;
        }
    }
    archive.drain().map_err(refusal)?;
    unpacker.finish();
    Ok(report)
}

/// Where the file of a hard link went: once or, as it may be part of several sources, more often.
fn linked(entry: &Entry, sources: &Sources) -> Result<Vec<Vec<u8>>, Error> {
    let places = sources.known(&clean(&entry.link)?);
    if places.is_empty() {
        let what = "a hard link to a file that is not among those to be copied";
        return Err(Error::invalid(what).at(&entry.path));
    }
    Ok(places)
}

/// What was written already, for another place: the archive is read once.
fn copy_content(written: &Path, file: &OwnedFd) -> Result<(), Error> {
    let copied = File::open(written)
        .and_then(|mut from| io::copy(&mut from, &mut File::from(file.try_clone()?)));
    copied.map_err(|err| Error::system("cannot write", err))?;
    Ok(())
}

fn refusal(err: Error) -> FileError {
    match err.kind {
        Kind::Invalid | Kind::Limit | Kind::Mismatch => FileError::bad(err.to_string()),
        Kind::NoSpace => FileError::from_io("", &io::Error::from_raw_os_error(libc::ENOSPC)),
        Kind::Other => FileError::new(StatusCode::INTERNAL_SERVER_ERROR, err.to_string()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// See whether anything stands in the way.
    Check,
    /// Move it.
    Move,
}

/// Moves a file, or what is in a directory, over what is there: directories are joined and stay as
/// they are, files are replaced.
///
/// Errors: 400 for a file in the place of a directory, and the other way round.
fn place(part: &Path, target: &Path, step: Step) -> Result<(), FileError> {
    let failed = |path: &Path, err: io::Error| {
        FileError::from_io(&format!("putting '{}'", path.display()), &err)
    };
    let mut open = vec![(part.to_owned(), target.to_owned())];
    while let Some((from, to)) = open.pop() {
        let is_dir = fs::symlink_metadata(&from)
            .map_err(|err| failed(&to, err))?
            .is_dir();
        // A link to a directory is as good as one.
        let there = if is_dir {
            fs::metadata(&to)
        } else {
            fs::symlink_metadata(&to)
        };
        let there_is_dir = match there {
            Ok(meta) => Some(meta.is_dir()),
            Err(err) if matches!(err.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                None
            }
            Err(err) => return Err(failed(&to, err)),
        };
        match (is_dir, there_is_dir) {
            (true, Some(true)) => {
                for entry in fs::read_dir(&from).map_err(|err| failed(&to, err))? {
                    let name = entry.map_err(|err| failed(&to, err))?.file_name();
                    open.push((from.join(&name), to.join(&name)));
                }
            }
            (true, Some(false)) => {
                let what = format!("'{}' is there and no directory", to.display());
                return Err(FileError::bad(what));
            }
            (false, Some(true)) => {
                let what = format!("'{}' is there and a directory", to.display());
                return Err(FileError::bad(what));
            }
            (_, None) | (false, Some(false)) if step == Step::Check => {}
            _ => match fs::rename(&from, &to) {
                // Something is mounted between the two.
                Err(err) if err.kind() == ErrorKind::CrossesDevices => {
                    move_by_copy(&from, &to).map_err(|err| failed(&to, err))?;
                }
                moved => moved.map_err(|err| failed(&to, err))?,
            },
        }
    }
    Ok(())
}

/// A directory that goes with all below it when it is dropped.
struct Staging(PathBuf);

impl Staging {
    fn new(beside: &Path) -> Result<Self, FileError> {
        let failed = |err| FileError::from_io(&format!("in '{}'", beside.display()), &err);
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|err| failed(err.into()))?;
        let name = format!(".opendsec-{:016x}", u64::from_ne_bytes(random));
        let path = beside.join(name);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let (Some(parent), Some(name)) = (self.0.parent(), self.0.file_name()) else {
            return;
        };
        // It may be deeper than std's own way could follow.
        if let (Ok(parent), Ok(name)) = (File::open(parent), CString::new(name.as_bytes())) {
            let _ = remove_tree(parent.as_fd(), &name);
        }
    }
}
