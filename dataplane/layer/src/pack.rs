// SPDX-License-Identifier: Apache-2.0
//! Makes a layer archive of a tree: the inverse of unpacking one. The same tree gives the same
//! bytes. Times are whole seconds, as in other makers' layers; sparse files are written out (the
//! OCI image specification advises against sparse entries).

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::archive::{Entry, EntryKind};
use crate::error::{Error, Kind, Result};
use crate::root::split;
use crate::stream::{Digests, format_digest};
use crate::unpack::{OPAQUE, WHITEOUT};
use crate::walk::{Item, Source};

/// Bytes handed from thread to thread at once.
const PIECE_BYTES: usize = 256 * 1024;
const PIECES_WAITING: usize = 8;
/// Longest name that fits a header (POSIX.1-2024, ustar).
const NAME_FIELD_BYTES: usize = 100;
const ZSTD_LEVEL: i32 = 3;

/// How the archive is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// By gzip.
    Gzip,
    /// By zstd.
    Zstd,
}

/// Writes a layer; its digests, and its length before compression.
///
/// Errors: as [`Source::walk`]; `Invalid` for names that a layer uses for itself and for files
/// that change meanwhile.
pub fn pack(
    mut source: Source,
    out: impl Write + Send + 'static,
    compression: Compression,
) -> Result<(Digests, u64)> {
    let mut builder = Builder::new(Pieces::new(out, compression)?);
    source.walk(|item| append(&mut builder, item))?;
    let pieces = builder.into_inner().map_err(|err| unwritten(&err))?;
    pieces.finish()
}

fn unwritten(err: &io::Error) -> Error {
    let what = format!("cannot write the layer: {err}");
    match err.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::new(Kind::NoSpace, what),
        _ => Error::new(Kind::Other, what),
    }
}

fn append(builder: &mut Builder<Pieces>, mut item: Item) -> Result<()> {
    let entry = &item.entry;
    let is_whiteout = entry.kind == EntryKind::CharDevice(0, 0);
    match split(&entry.path) {
        // The top is told only if it is not what every unpacker takes it for.
        None if (entry.mode, entry.uid, entry.gid) == (0o755, 0, 0) && entry.xattrs.is_empty() => {}
        None => plain(builder, entry, b"./")?,
        Some((_, name)) if name.starts_with(WHITEOUT) => {
            return Err(Error::invalid(
                "a name that begins with '.wh.', by which layers say that a file is gone",
            ));
        }
        Some((dir, name)) if is_whiteout => {
            let path = join(dir, &[WHITEOUT, name].concat());
            return mark(builder, entry, &path);
        }
        Some(_) => match &mut item.file {
            Some(file) => content(builder, &item.entry, file)?,
            None => plain(builder, entry, &entry.path)?,
        },
    }
    if item.is_opaque {
        mark(builder, &item.entry, &join(&item.entry.path, OPAQUE))?;
    }
    Ok(())
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = dir.to_vec();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// An empty file by which a layer says something.
fn mark(builder: &mut Builder<Pieces>, entry: &Entry, path: &[u8]) -> Result<()> {
    let said = Entry {
        kind: EntryKind::File,
        mode: 0o600,
        uid: 0,
        gid: 0,
        xattrs: Vec::new(),
        link: Vec::new(),
        size: 0,
        ..entry.clone()
    };
    plain(builder, &said, path)
}

fn plain(builder: &mut Builder<Pieces>, entry: &Entry, path: &[u8]) -> Result<()> {
    let header = head(builder, entry, path)?;
    builder
        .append(&header, io::empty())
        .map_err(|err| unwritten(&err))
}

fn content(builder: &mut Builder<Pieces>, entry: &Entry, file: &mut File) -> Result<()> {
    let header = head(builder, entry, &entry.path)?;
    let mut exact = Exact {
        file: Read::take(&*file, entry.size),
    };
    builder
        .append(&header, BufReader::with_capacity(PIECE_BYTES, &mut exact))
        .map_err(|err| unwritten(&err))?;
    if exact.file.limit() > 0 {
        return Err(Error::invalid("it became shorter while it was read"));
    }
    Ok(())
}

/// As much of a file as was announced, at most.
struct Exact<'a> {
    file: io::Take<&'a File>,
}

impl Read for Exact<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.file.read(out)
    }
}

/// The header of an entry, after the extension record that it needs.
fn head(builder: &mut Builder<Pieces>, entry: &Entry, path: &[u8]) -> Result<Header> {
    let mut header = Header::new_ustar();
    let mut path = path.to_vec();
    if entry.kind == EntryKind::Dir && !path.ends_with(b"/") {
        path.push(b'/');
    }
    let (sort, device) = match entry.kind {
        EntryKind::File => (EntryType::Regular, None),
        EntryKind::Dir => (EntryType::Directory, None),
        EntryKind::Symlink => (EntryType::Symlink, None),
        EntryKind::HardLink => (EntryType::Link, None),
        EntryKind::Fifo => (EntryType::Fifo, None),
        EntryKind::CharDevice(major, minor) => (EntryType::Char, Some((major, minor))),
        EntryKind::BlockDevice(major, minor) => (EntryType::Block, Some((major, minor))),
    };
    let mut records: Vec<(String, &[u8])> = Vec::new();
    let fields = header.as_old_mut();
    if path.len() > NAME_FIELD_BYTES {
        records.push(("path".into(), &path));
    }
    if entry.link.len() > NAME_FIELD_BYTES {
        records.push(("linkpath".into(), &entry.link));
    }
    fill(&mut fields.name, &path);
    fill(&mut fields.linkname, &entry.link);
    header.set_entry_type(sort);
    header.set_mode(entry.mode);
    header.set_uid(u64::from(entry.uid));
    header.set_gid(u64::from(entry.gid));
    header.set_size(entry.size);
    let seconds = entry.mtime.0.to_string();
    match u64::try_from(entry.mtime.0) {
        Ok(mtime) => header.set_mtime(mtime),
        Err(_) => {
            header.set_mtime(0);
            records.push(("mtime".into(), seconds.as_bytes()));
        }
    }
    if let Some((major, minor)) = device {
        header
            .set_device_major(major)
            .and_then(|()| header.set_device_minor(minor))
            .map_err(|err| Error::invalid(format!("a device's number: {err}")))?;
    }
    for (name, value) in &entry.xattrs {
        let name = std::str::from_utf8(name)
            .map_err(|_| Error::invalid("an extended attribute whose name is no text"))?;
        if name.contains('=') {
            return Err(Error::invalid("an extended attribute with '=' in its name"));
        }
        records.push((format!("SCHILY.xattr.{name}"), value));
    }
    header.set_cksum();
    if !records.is_empty() {
        let records = records.iter().map(|(key, value)| (key.as_str(), *value));
        builder
            .append_pax_extensions(records)
            .map_err(|err| unwritten(&err))?;
    }
    Ok(header)
}

/// As much of a text as fits.
fn fill(field: &mut [u8], text: &[u8]) {
    let len = text.len().min(field.len());
    field[..len].copy_from_slice(&text[..len]);
}

/// Digests what is written and hands it to a thread that compresses it and digests the result.
struct Pieces {
    pending: Vec<u8>,
    diff: Sha256,
    bytes: u64,
    to_writer: Option<SyncSender<Vec<u8>>>,
    writer: Option<JoinHandle<io::Result<String>>>,
}

impl Pieces {
    fn new(out: impl Write + Send + 'static, compression: Compression) -> Result<Self> {
        let (to_writer, pieces) = sync_channel(PIECES_WAITING);
        let writer = std::thread::Builder::new()
            .spawn(move || write_out(&pieces, out, compression))
            .map_err(|err| Error::system("cannot start a thread", err))?;
        Ok(Self {
            pending: Vec::with_capacity(PIECE_BYTES),
            diff: Sha256::new(),
            bytes: 0,
            to_writer: Some(to_writer),
            writer: Some(writer),
        })
    }

    fn hand_over(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.pending, Vec::with_capacity(PIECE_BYTES));
        self.diff.update(&piece);
        self.bytes += piece.len() as u64;
        let sent = self.to_writer.as_ref().map(|to| to.send(piece).is_ok());
        if sent == Some(true) {
            return Ok(());
        }
        // It has ended, so it tells why.
        Err(self
            .join()
            .err()
            .unwrap_or(io::ErrorKind::BrokenPipe.into()))
    }

    fn join(&mut self) -> io::Result<String> {
        self.to_writer = None;
        match self.writer.take().map(JoinHandle::join) {
            Some(Ok(written)) => written,
            _ => Err(io::Error::other("a thread failed")),
        }
    }

    fn finish(mut self) -> Result<(Digests, u64)> {
        self.hand_over().map_err(|err| unwritten(&err))?;
        let blob = self.join().map_err(|err| unwritten(&err))?;
        let diff = format_digest(std::mem::take(&mut self.diff));
        Ok((Digests { blob, diff }, self.bytes))
    }
}

impl Write for Pieces {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = data.len().min(PIECE_BYTES - self.pending.len());
        self.pending.extend_from_slice(&data[..len]);
        if self.pending.len() == PIECE_BYTES {
            self.hand_over()?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_out(
    pieces: &Receiver<Vec<u8>>,
    out: impl Write,
    compression: Compression,
) -> io::Result<String> {
    let digesting = Digesting {
        out,
        sum: Sha256::new(),
    };
    let mut done = match compression {
        Compression::None => write_pieces(pieces, digesting)?,
        Compression::Gzip => {
            // No name and no time in its header, so that it is the same each time.
            let level = flate2::Compression::default();
            write_pieces(pieces, flate2::write::GzEncoder::new(digesting, level))?.finish()?
        }
        Compression::Zstd => write_pieces(
            pieces,
            zstd::stream::write::Encoder::new(digesting, ZSTD_LEVEL)?,
        )?
        .finish()?,
    };
    done.out.flush()?;
    Ok(format_digest(done.sum))
}

fn write_pieces<W: Write>(pieces: &Receiver<Vec<u8>>, mut out: W) -> io::Result<W> {
    for piece in pieces {
        out.write_all(&piece)?;
    }
    Ok(out)
}

struct Digesting<W> {
    out: W,
    sum: Sha256,
}

impl<W: Write> Write for Digesting<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.out.write(data)?;
        self.sum.update(&data[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
