// SPDX-License-Identifier: Apache-2.0
//! Reads tar streams: ustar, GNU and pax (POSIX.1-2024), with long names, sparse files and extended
//! attributes.
//!
//! The `tar` crate knows the header's fields; its own loop takes extension records into memory
//! without a bound and splits attribute values at line ends, so the loop is here.

use std::io::BufRead;

use tar::{EntryType, GnuExtSparseHeader, Header};

use crate::error::{Error, Kind, Result};

const BLOCK: usize = 512;
/// Largest extension record (long name, pax record). A record holds all attributes of one file.
const EXTENSION_BYTES_MAX: u64 = 1024 * 1024;
/// Pieces of one sparse file.
const SPARSE_PIECES_MAX: usize = 1_000_000;

/// What may come out of an archive.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the stream, and bytes of all files (holes counted), each.
    pub bytes_max: u64,
    /// Files, directories, links and all others.
    pub entries_max: u64,
}

/// The sort of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A further name of a file that came earlier.
    HardLink,
    /// A character device with its numbers.
    CharDevice(u32, u32),
    /// A block device with its numbers.
    BlockDevice(u32, u32),
    /// A named pipe.
    Fifo,
}

/// One entry. Its content is read from the archive afterwards.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where it goes, as the archive says it.
    pub path: Vec<u8>,
    /// Where a link leads.
    pub link: Vec<u8>,
    /// Its sort.
    pub kind: EntryKind,
    /// Mode bits, without those of the sort.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last change: Unix seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Extended attributes by name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Length of the file, with its holes.
    pub size: u64,
    /// Offset and length of each piece of a sparse file that is in the archive, in order.
    pub pieces: Option<Vec<(u64, u64)>>,
}

/// A tar stream.
pub struct Archive<R> {
    input: R,
    limits: Limits,
    /// Taken from the input so far.
    taken: u64,
    entries: u64,
    /// Length of all files so far.
    content: u64,
    /// Content of the current entry that is still in the input, and what fills its last block.
    left: u64,
    padding: u64,
    ended: bool,
}

/// What extension records say of the entry that follows them.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse: Sparse,
}

/// Sparse files of GNU tar's pax formats 0.0, 0.1 and 1.0.
#[derive(Default)]
struct Sparse {
    name: Option<Vec<u8>>,
    real_size: Option<u64>,
    is_1_0: bool,
    numbers: Vec<u64>,
}

impl<R: BufRead> Archive<R> {
    /// An archive at its begin.
    pub fn new(input: R, limits: Limits) -> Self {
        Self {
            input,
            limits,
            taken: 0,
            entries: 0,
            content: 0,
            left: 0,
            padding: 0,
            ended: false,
        }
    }

    /// Bytes of the stream taken so far.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Entries so far.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// The next entry; what is left of the content of the one before is skipped.
    ///
    /// Errors: `Invalid` for what is no archive, `Limit`, and what the input says.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut more = Extensions::default();
        loop {
            self.skip(self.left)?;
            self.skip(self.padding)?;
            (self.left, self.padding) = (0, 0);
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            let size = header
                .entry_size()
                .map_err(|err| Error::invalid(format!("a header's size: {err}")))?;
            match header.entry_type() {
                EntryType::GNULongName => more.path = Some(self.long_name(size)?),
                EntryType::GNULongLink => more.link = Some(self.long_name(size)?),
                EntryType::XHeader => {
                    let record = self.extension(size)?;
                    more.take_record(&record)?;
                }
                // Defaults for all entries: nobody puts more than comments there.
                EntryType::XGlobalHeader => drop(self.extension(size)?),
                // The volume's label.
                kind if kind.as_byte() == b'V' => self.begin_content(size),
                _ => return self.entry(&header, size, more).map(Some),
            }
        }
    }

    /// Gives content of the current entry to `sink`, at most `wanted` bytes.
    ///
    /// Errors: `Invalid` if there is less, and those of `sink`.
    pub fn read(&mut self, wanted: u64, mut sink: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if wanted > self.left {
            return Err(Error::invalid("a file is shorter than its header says"));
        }
        self.left -= wanted;
        let mut wanted = wanted;
        while wanted > 0 {
            let piece = self.fill()?;
            if piece.is_empty() {
                return Err(broken_off());
            }
            let take = usize::try_from(wanted).map_or(piece.len(), |most| most.min(piece.len()));
            sink(&piece[..take])?;
            self.consume(take)?;
            wanted -= take as u64;
        }
        Ok(())
    }

    /// Reads on to the end of the input, which may lie behind the end of the archive.
    ///
    /// Errors: as `next_entry`.
    pub fn drain(&mut self) -> Result<()> {
        loop {
            let len = self.fill()?.len();
            if len == 0 {
                return Ok(());
            }
            self.consume(len)?;
        }
    }

    fn fill(&mut self) -> Result<&[u8]> {
        self.input.fill_buf().map_err(|err| Error::of_input(&err))
    }

    fn consume(&mut self, len: usize) -> Result<()> {
        self.input.consume(len);
        self.taken += len as u64;
        if self.taken > self.limits.bytes_max {
            return Err(too_large(self.limits.bytes_max));
        }
        Ok(())
    }

    fn skip(&mut self, len: u64) -> Result<()> {
        self.left = len;
        self.read(len, |_| Ok(()))
    }

    /// Fills a block; `false` if the input ends before it.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool> {
        let mut have = 0;
        while have < BLOCK {
            let piece = self.fill()?;
            if piece.is_empty() {
                return if have == 0 {
                    Ok(false)
                } else {
                    Err(broken_off())
                };
            }
            let take = piece.len().min(BLOCK - have);
            block[have..have + take].copy_from_slice(&piece[..take]);
            self.consume(take)?;
            have += take;
        }
        Ok(true)
    }

    /// The next header; `None` at the end. An archive ends with two blocks of zeros, but some
    /// writers leave them out.
    fn header(&mut self) -> Result<Option<Header>> {
        if self.ended {
            return Ok(None);
        }
        let mut block = [0; BLOCK];
        if !self.block(&mut block)? || block.iter().all(|byte| *byte == 0) {
            self.ended = true;
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block).clone();
        // The field of the sum counts as spaces (POSIX.1-2024, ustar).
        let sum: u32 = block[..148]
            .iter()
            .chain(&[b' '; 8])
            .chain(&block[156..])
            .map(|byte| u32::from(*byte))
            .sum();
        if header.cksum().ok() != Some(sum) {
            return Err(Error::invalid("this is no tar archive, or it is damaged"));
        }
        Ok(Some(header))
    }

    fn begin_content(&mut self, size: u64) {
        self.left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > EXTENSION_BYTES_MAX {
            return Err(Error::invalid(format!(
                "an extension record of {size} bytes; {EXTENSION_BYTES_MAX} are the most"
            )));
        }
        self.begin_content(size);
        let mut record = Vec::new();
        self.read(size, |piece| {
            record.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(record)
    }

    fn long_name(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut name = self.extension(size)?;
        if let Some(end) = name.iter().position(|byte| *byte == 0) {
            name.truncate(end);
        }
        Ok(name)
    }

    fn entry(&mut self, header: &Header, size: u64, more: Extensions) -> Result<Entry> {
        let path = match (more.sparse.name.clone(), more.path) {
            (Some(name), _) | (None, Some(name)) => name,
            (None, None) => header.path_bytes().into_owned(),
        };
        self.entries += 1;
        if self.entries > self.limits.entries_max {
            let most = self.limits.entries_max;
            return Err(Error::new(Kind::Limit, format!("more than {most} entries")).at(&path));
        }
        let stored = more.size.unwrap_or(size);
        self.begin_content(stored);
        let number = |what: &str, value: std::io::Result<u64>| {
            value
                .ok()
                .and_then(|value| u32::try_from(value).ok())
                .ok_or_else(|| {
                    Error::invalid(format!("the header's {what} is no number")).at(&path)
                })
        };
        let is_dir_by_name = path.ends_with(b"/");
        let device = |value: std::io::Result<Option<u32>>| value.ok().flatten().unwrap_or(0);
        let kind = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous if is_dir_by_name => EntryKind::Dir,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => EntryKind::File,
            EntryType::Directory => EntryKind::Dir,
            EntryType::Symlink => EntryKind::Symlink,
            EntryType::Link => EntryKind::HardLink,
            EntryType::Fifo => EntryKind::Fifo,
            EntryType::Char => {
                EntryKind::CharDevice(device(header.device_major()), device(header.device_minor()))
            }
            EntryType::Block => {
                EntryKind::BlockDevice(device(header.device_major()), device(header.device_minor()))
            }
            // GNU tar's incremental archives.
            other if other.as_byte() == b'D' => EntryKind::Dir,
            other => {
                let sort = char::from(other.as_byte());
                return Err(Error::invalid(format!("an entry of unknown sort '{sort}'")).at(&path));
            }
        };
        let mode = number("mode", header.mode().map(u64::from))? & 0o7777;
        let uid = more.uid.map_or_else(|| number("uid", header.uid()), Ok)?;
        let gid = more.gid.map_or_else(|| number("gid", header.gid()), Ok)?;
        // Times before 1970 are negative in the binary form; the cast gives them back.
        let seconds = header.mtime().unwrap_or(0).cast_signed();
        let mut entry = Entry {
            link: more
                .link
                .or_else(|| header.link_name_bytes().map(|name| name.into_owned()))
                .unwrap_or_default(),
            kind,
            mode,
            uid,
            gid,
            mtime: more.mtime.unwrap_or((seconds, 0)),
            xattrs: more.xattrs,
            size: stored,
            pieces: None,
            path,
        };
        if kind == EntryKind::File {
            self.sparse(header, more.sparse, &mut entry)
                .map_err(|err| err.at(&entry.path))?;
            self.content = self.content.saturating_add(entry.size);
            if self.content > self.limits.bytes_max {
                return Err(too_large(self.limits.bytes_max).at(&entry.path));
            }
        }
        Ok(entry)
    }

    /// Finds out where the pieces of a sparse file go.
    fn sparse(&mut self, header: &Header, pax: Sparse, entry: &mut Entry) -> Result<()> {
        let mut numbers = pax.numbers;
        let real_size = if header.entry_type() == EntryType::GNUSparse {
            self.gnu_pieces(header, &mut numbers)?
        } else if pax.is_1_0 {
            self.leading_pieces(&mut numbers)?;
            pax.real_size
                .ok_or_else(|| Error::invalid("a sparse file without its length"))?
        } else if let (Some(real_size), false) = (pax.real_size, numbers.is_empty()) {
            real_size
        } else {
            return Ok(());
        };
        if !numbers.len().is_multiple_of(2) {
            return Err(bad_sparse());
        }
        let pieces: Vec<(u64, u64)> = numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect();
        let (mut end, mut stored) = (0, 0u64);
        for (offset, len) in &pieces {
            let next = offset.checked_add(*len).ok_or_else(bad_sparse)?;
            if *offset < end || next > real_size {
                return Err(bad_sparse());
            }
            (end, stored) = (next, stored + len);
        }
        if stored != self.left {
            return Err(bad_sparse());
        }
        entry.size = real_size;
        entry.pieces = Some(pieces);
        Ok(())
    }

    /// Pieces of the old GNU form: four in the header, further ones in blocks behind it, which do
    /// not count as content.
    fn gnu_pieces(&mut self, header: &Header, numbers: &mut Vec<u64>) -> Result<u64> {
        let gnu = header.as_gnu().ok_or_else(bad_sparse)?;
        let bad = |_| bad_sparse();
        let mut add = |piece: &tar::GnuSparseHeader| -> Result<()> {
            if piece.is_empty() {
                return Ok(());
            }
            if numbers.len() / 2 >= SPARSE_PIECES_MAX {
                return Err(bad_sparse());
            }
            numbers.push(piece.offset().map_err(bad)?);
            numbers.push(piece.length().map_err(bad)?);
            Ok(())
        };
        gnu.sparse.iter().try_for_each(&mut add)?;
        let mut extended = gnu.is_extended();
        while extended {
            let mut block = [0; BLOCK];
            if !self.block(&mut block)? {
                return Err(broken_off());
            }
            let mut further = GnuExtSparseHeader::new();
            further.as_mut_bytes().copy_from_slice(&block);
            further.sparse().iter().try_for_each(&mut add)?;
            extended = further.is_extended();
        }
        gnu.real_size().map_err(bad)
    }

    /// Pieces of the pax form 1.0: decimal numbers in the first blocks of the content, each on a
    /// line, the count of pieces first.
    fn leading_pieces(&mut self, numbers: &mut Vec<u64>) -> Result<()> {
        let (mut wanted, mut number, mut digits) = (None, 0u64, false);
        numbers.clear();
        loop {
            let mut block = Vec::with_capacity(BLOCK);
            self.read(BLOCK as u64, |piece| {
                block.extend_from_slice(piece);
                Ok(())
            })?;
            for byte in block {
                match byte {
                    b'0'..=b'9' => {
                        number = number
                            .checked_mul(10)
                            .and_then(|tens| tens.checked_add(u64::from(byte - b'0')))
                            .ok_or_else(bad_sparse)?;
                        digits = true;
                    }
                    b'\n' if digits => {
                        match wanted {
                            None if number > SPARSE_PIECES_MAX as u64 => return Err(bad_sparse()),
                            None => wanted = Some(number * 2),
                            Some(_) => numbers.push(number),
                        }
                        if wanted == Some(numbers.len() as u64) {
                            return Ok(());
                        }
                        (number, digits) = (0, false);
                    }
                    _ => return Err(bad_sparse()),
                }
            }
        }
    }
}

impl Extensions {
    /// Takes a pax record: lines of `LENGTH KEY=VALUE`, the length being that of the whole line.
    /// A value may hold line ends.
    fn take_record(&mut self, mut record: &[u8]) -> Result<()> {
        let bad = || Error::invalid("a damaged pax record");
        // GNU tar fills some with zeros.
        while record.first().is_some_and(|byte| *byte != 0) {
            let space = record.iter().position(|b| *b == b' ').ok_or_else(bad)?;
            let len: usize = parse(&record[..space]).ok_or_else(bad)?;
            if len <= space + 1 || len > record.len() || record[len - 1] != b'\n' {
                return Err(bad());
            }
            let (line, rest) = record.split_at(len);
            let pair = &line[space + 1..len - 1];
            let equals = pair.iter().position(|b| *b == b'=').ok_or_else(bad)?;
            self.set(&pair[..equals], &pair[equals + 1..])
                .ok_or_else(bad)?;
            record = rest;
        }
        Ok(())
    }

    /// `None` if the value is not what the key needs.
    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let pieces = &mut self.sparse.numbers;
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(parse(value)?),
            b"uid" => self.uid = Some(parse(value)?),
            b"gid" => self.gid = Some(parse(value)?),
            b"mtime" => self.mtime = Some(parse_time(value)?),
            b"GNU.sparse.name" => self.sparse.name = Some(value.to_vec()),
            b"GNU.sparse.major" => self.sparse.is_1_0 = value == b"1",
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
                self.sparse.real_size = Some(parse(value)?);
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => pieces.push(parse(value)?),
            b"GNU.sparse.map" => {
                pieces.clear();
                for number in value.split(|byte| *byte == b',') {
                    pieces.push(parse(number)?);
                }
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Some(())
    }
}

fn parse<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Seconds with a fraction, such as `-1.25`.
fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let mut nanos = 0;
    for place in 0..9 {
        let digit = match fraction.as_bytes().get(place) {
            None => 0,
            Some(byte) if byte.is_ascii_digit() => u32::from(byte - b'0'),
            Some(_) => return None,
        };
        nanos = nanos * 10 + digit;
    }
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

fn broken_off() -> Error {
    Error::invalid("the archive breaks off")
}

fn bad_sparse() -> Error {
    Error::invalid("a sparse file whose pieces do not fit")
}

fn too_large(most: u64) -> Error {
    Error::new(
        Kind::Limit,
        format!("the archive holds more than {most} bytes"),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse_time(b"12"), Some((12, 0)));
        assert_eq!(parse_time(b"12.5"), Some((12, 500_000_000)));
        assert_eq!(parse_time(b"12.1234567891"), Some((12, 123_456_789)));
        assert_eq!(parse_time(b"-1.25"), Some((-2, 750_000_000)));
        assert_eq!(parse_time(b"-0.25"), Some((-1, 750_000_000)));
        assert_eq!(parse_time(b"x"), None);
        assert_eq!(parse_time(b"1.x"), None);
    }

    #[test]
    fn values_with_line_ends() {
        let mut more = Extensions::default();
        more.take_record(b"32 SCHILY.xattr.user.a=x\ny\n=z\0\n\n11 path=ab\n")
            .unwrap();
        assert_eq!(
            more.xattrs,
            [(b"user.a".to_vec(), b"x\ny\n=z\0\n".to_vec())]
        );
        assert_eq!(more.path.as_deref(), Some(&b"ab"[..]));
        for bad in [
            &b"8 path=a\n"[..],
            b"x",
            b"5 a=b",
            b"6 size\n",
            b"9 size=x\n",
            b"0 \n",
        ] {
            assert!(Extensions::default().take_record(bad).is_err());
        }
    }

    fn limits() -> Limits {
        Limits {
            bytes_max: 1 << 20,
            entries_max: 1000,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn any_bytes_are_survived(data in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let mut archive = Archive::new(&data[..], limits());
            while let Ok(Some(_)) = archive.next_entry() {}
            prop_assert!(archive.taken() <= data.len() as u64);
        }

        #[test]
        fn any_header_with_a_right_sum_is_survived(
            mut data in proptest::collection::vec(any::<u8>(), 2048..4096),
            kind in proptest::sample::select(b"05SxgKL1234V".to_vec()),
            size in 0u64..4096,
        ) {
            let mut header = Header::new_gnu();
            header.as_mut_bytes()[257..].copy_from_slice(&data[257..512]);
            header.as_mut_bytes()[257..265].copy_from_slice(b"ustar  \0");
            header.set_entry_type(EntryType::new(kind));
            header.set_size(size);
            header.set_cksum();
            data[..512].copy_from_slice(header.as_bytes());
            let mut archive = Archive::new(&data[..], limits());
            while let Ok(Some(_)) = archive.next_entry() {}
        }
    }
}
