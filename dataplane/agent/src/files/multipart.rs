// SPDX-License-Identifier: Apache-2.0
//! Cutting `multipart/form-data` (RFC 7578, RFC 2046) while it arrives.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memmem::Finder;

use crate::limits::PART_HEAD_BYTES_MAX;

/// Longest boundary (RFC 2046, section 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;

/// What comes out of a multipart body, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// A part begins.
    Head(PartHead),
    /// Bytes of the part.
    Data(Bytes),
    /// The part is whole.
    PartEnd,
    /// The body is whole; nothing follows.
    End,
}

/// What a part says about itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PartHead {
    /// Name of the form field.
    pub name: Option<String>,
    /// Name of the file; it may be a path.
    pub file_name: Option<String>,
}

enum State {
    Preamble,
    AfterBoundary,
    Head,
    Data,
    End,
}

/// The cutter. Feed it and ask it until it wants more.
pub struct Multipart {
    buffer: BytesMut,
    delimiter: Finder<'static>,
    state: State,
}

impl Multipart {
    /// For the boundary of a `Content-Type` header.
    ///
    /// Errors: a message, if there is none that is valid.
    pub fn new(content_type: &str) -> Result<Self, &'static str> {
        let boundary = parameter(content_type, "boundary").ok_or("boundary is missing")?;
        if boundary.is_empty() || boundary.len() > BOUNDARY_BYTES_MAX {
            return Err("boundary is empty or too long");
        }
        let delimiter = format!("\r\n--{boundary}");
        Ok(Self {
            // The first boundary may stand at the very start, without the line break before it.
            buffer: BytesMut::from(&b"\r\n"[..]),
            delimiter: Finder::new(delimiter.as_bytes()).into_owned(),
            state: State::Preamble,
        })
    }

    /// Adds what came from the network.
    pub fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// Whether the closing boundary has come.
    pub fn is_whole(&self) -> bool {
        matches!(self.state, State::End)
    }

    /// The next piece, or `None` if more bytes are needed.
    ///
    /// Errors: a message for what is no multipart body.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, &'static str> {
        loop {
            match self.state {
                State::Preamble => {
                    if !self.skip_preamble() {
                        return Ok(None);
                    }
                }
                State::AfterBoundary => match self.after_boundary()? {
                    None => return Ok(None),
                    Some(true) => {
                        self.state = State::End;
                        return Ok(Some(Piece::End));
                    }
                    Some(false) => self.state = State::Head,
                },
                State::Head => return self.head(),
                State::Data => return Ok(self.data()),
                State::End => {
                    self.buffer.clear();
                    return Ok(None);
                }
            }
        }
    }

    fn skip_preamble(&mut self) -> bool {
        let length = self.delimiter.needle().len();
        if let Some(at) = self.delimiter.find(&self.buffer) {
            self.buffer.advance(at + length);
            self.state = State::AfterBoundary;
            return true;
        }
        let keep = self.buffer.len().min(length - 1);
        self.buffer.advance(self.buffer.len() - keep);
        false
    }

    /// Whether the boundary was the last one. The line break after it stays: with it, a head is
    /// always ended by two line breaks, even an empty one.
    fn after_boundary(&mut self) -> Result<Option<bool>, &'static str> {
        if self.buffer.starts_with(b"--") {
            return Ok(Some(true));
        }
        let padding = self
            .buffer
            .iter()
            .take_while(|byte| matches!(**byte, b' ' | b'\t'))
            .count();
        if padding > PART_HEAD_BYTES_MAX {
            return Err("too much white space after a boundary");
        }
        match &self.buffer[padding..] {
            [] | [b'-' | b'\r'] => Ok(None),
            [b'\r', b'\n', ..] => {
                self.buffer.advance(padding);
                Ok(Some(false))
            }
            _ => Err("a boundary is not at the end of its line"),
        }
    }

    fn head(&mut self) -> Result<Option<Piece>, &'static str> {
        let Some(end) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") else {
            if self.buffer.len() > PART_HEAD_BYTES_MAX {
                return Err("the head of a part is too long");
            }
            return Ok(None);
        };
        if end > PART_HEAD_BYTES_MAX {
            return Err("the head of a part is too long");
        }
        let raw = self.buffer.split_to(end + 4);
        self.state = State::Data;
        Ok(Some(Piece::Head(parse_head(&String::from_utf8_lossy(
            &raw,
        )))))
    }

    fn data(&mut self) -> Option<Piece> {
        let length = self.delimiter.needle().len();
        match self.delimiter.find(&self.buffer) {
            Some(0) => {
                self.buffer.advance(length);
                self.state = State::AfterBoundary;
                Some(Piece::PartEnd)
            }
            Some(at) => Some(Piece::Data(self.buffer.split_to(at).freeze())),
            None => {
                // The end may be the beginning of a boundary.
                let sure = self.buffer.len().saturating_sub(length - 1);
                (sure > 0).then(|| Piece::Data(self.buffer.split_to(sure).freeze()))
            }
        }
    }
}

fn parse_head(text: &str) -> PartHead {
    let line = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim()
            .eq_ignore_ascii_case("content-disposition")
            .then_some(value)
    });
    let Some(value) = line else {
        return PartHead::default();
    };
    let extended = parameter(value, "filename*").and_then(|text| decode_extended(&text));
    PartHead {
        name: parameter(value, "name"),
        file_name: extended.or_else(|| parameter(value, "filename")),
    }
}

/// The value of `; name=value` or `; name="value"` in a header.
fn parameter(header: &str, wanted: &str) -> Option<String> {
    let mut rest = header.split_once(';')?.1;
    loop {
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (value, tail) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let (value, tail) = after.split_once(';').unwrap_or((after, ""));
                (value.trim().to_owned(), tail)
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = tail.trim_start().strip_prefix(';').unwrap_or(tail);
    }
}

/// A quoted string without its first quote: the text and what follows the last quote. Only a
/// quote and a backslash are escaped, so that paths with other backslashes stay whole.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices().peekable();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => value.push(escaped),
                None => value.push('\\'),
            },
            other => value.push(other),
        }
    }
    None
}

/// An extended value (RFC 8187): `utf-8''percent-encoded`.
fn decode_extended(text: &str) -> Option<String> {
    let mut parts = text.splitn(3, '\'');
    let charset = parts.next()?;
    let encoded = parts.nth(1)?;
    if !charset.eq_ignore_ascii_case("utf-8") {
        return None;
    }
    let mut raw = Vec::new();
    let mut bytes = encoded.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next()?, bytes.next()?];
            raw.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            raw.push(byte);
        }
    }
    String::from_utf8(raw).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=XyZ";

    type Files = Vec<(Option<String>, Vec<u8>)>;

    /// Cuts `wire` and gives all files, and whether the body was whole.
    fn read(wire: &[u8], cut: usize) -> Result<(Files, bool), &'static str> {
        let mut multipart = Multipart::new(TYPE)?;
        let mut files = Vec::new();
        let mut open: Option<(Option<String>, Vec<u8>)> = None;
        for piece in wire.chunks(cut) {
            multipart.push(piece);
            while let Some(piece) = multipart.next_piece()? {
                match piece {
                    Piece::Head(head) => open = Some((head.file_name, Vec::new())),
                    Piece::Data(data) => open.as_mut().unwrap().1.extend_from_slice(&data),
                    Piece::PartEnd => files.push(open.take().unwrap()),
                    Piece::End => {}
                }
            }
        }
        Ok((files, multipart.is_whole()))
    }

    fn write(parts: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut wire = b"preamble".to_vec();
        for (name, data) in parts {
            wire.extend_from_slice(
                b"\r\n--XyZ\r\nContent-Disposition: form-data; name=\"file\"; filename=\"",
            );
            wire.extend_from_slice(name.as_bytes());
            wire.extend_from_slice(b"\"\r\nContent-Type: text/plain\r\n\r\n");
            wire.extend_from_slice(data);
        }
        wire.extend_from_slice(b"\r\n--XyZ--\r\nepilogue");
        wire
    }

    #[test]
    fn boundary_at_the_very_start_and_no_head() {
        let (files, whole) = read(b"--XyZ\r\n\r\nabc\r\n--XyZ  \r\n\r\n\r\n--XyZ--", 3).unwrap();
        assert_eq!(files, vec![(None, b"abc".to_vec()), (None, Vec::new())]);
        assert!(whole);
    }

    #[test]
    fn broken_bodies() {
        assert!(!read(b"--XyZ\r\n\r\nabc\r\n--Xy", 5).unwrap().1);
        assert!(read(b"--XyZ?\r\n\r\n", 5).is_err());
        let mut long = b"--XyZ\r\n".to_vec();
        long.resize(PART_HEAD_BYTES_MAX + 100, b'x');
        assert!(read(&long, 1000).is_err());
        assert!(Multipart::new("multipart/form-data").is_err());
    }

    #[test]
    fn heads() {
        let head = |text: &str| parse_head(&format!("\r\nContent-Disposition: {text}\r\n\r\n"));
        let name = |text: &str| head(text).file_name;
        assert_eq!(
            name(r#"form-data; name="file"; filename="/a/b;c=d.txt""#).as_deref(),
            Some("/a/b;c=d.txt")
        );
        assert_eq!(
            name(r#"form-data; filename="q\"\\x\y""#).as_deref(),
            Some(r#"q"\x\y"#)
        );
        assert_eq!(
            name("form-data; name=file; filename=plain").as_deref(),
            Some("plain")
        );
        let both = r#"form-data; filename="x"; filename*=UTF-8''%C3%A4%2Fb"#;
        assert_eq!(name(both).as_deref(), Some("ä/b"));
        assert_eq!(name("form-data; name=file"), None);
        assert_eq!(
            head(r#"form-data; name="file""#).name.as_deref(),
            Some("file")
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn files_survive_any_cut(
            parts in proptest::collection::vec(
                ("[a-z/]{1,12}", proptest::collection::vec(
                    prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'X'), any::<u8>()], 0..120)),
                0..4,
            ),
            cut in 1usize..64,
        ) {
            let clean = parts.iter().all(|(_, data)| memchr::memmem::find(data, b"\r\n--XyZ").is_none());
            prop_assume!(clean);
            let (files, whole) = read(&write(&parts), cut).unwrap();
            let expected: Vec<_> = parts.into_iter().map(|(name, data)| (Some(name), data)).collect();
            prop_assert_eq!(files, expected);
            prop_assert!(whole);
        }

        #[test]
        fn garbage_is_survived(data in proptest::collection::vec(any::<u8>(), 0..300), cut in 1usize..50) {
            let _ = read(&data, cut);
            let mut started = b"--XyZ\r\n".to_vec();
            started.extend_from_slice(&data);
            let _ = read(&started, cut);
        }

        #[test]
        fn any_header_is_survived(text in "\\PC{0,60}") {
            let _ = parameter(&text, "filename");
            let _ = decode_extended(&text);
        }
    }
}
