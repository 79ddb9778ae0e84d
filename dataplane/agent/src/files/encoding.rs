// SPDX-License-Identifier: Apache-2.0
//! Content codings: which one an answer uses, and unpacking of uploads.

use std::io::{self, Write};

use flate2::write::MultiGzDecoder;
use hyper::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap};

/// How a body is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// As it is.
    Identity,
    /// gzip (RFC 1952).
    Gzip,
}

/// What a client accepts (RFC 9110, section 12.5.3).
struct Accepted {
    gzip: bool,
    identity: bool,
    others: bool,
}

fn accepted(headers: &HeaderMap) -> Accepted {
    let mut gzip = None;
    let mut identity = None;
    let mut any = None;
    let mut others = false;
    let values = headers
        .get_all(ACCEPT_ENCODING)
        .iter()
        .filter_map(|value| value.to_str().ok());
    for item in values.flat_map(|value| value.split(',')) {
        let mut parts = item.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default().to_ascii_lowercase();
        let weight = parts
            .find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")))
            .map_or(1.0, |text| text.trim().parse::<f32>().unwrap_or(1.0));
        let wanted = weight > 0.0;
        match name.as_str() {
            "" => {}
            "gzip" | "x-gzip" => gzip = Some(wanted),
            "identity" => identity = Some(wanted),
            "*" => any = Some(wanted),
            _ => others |= wanted,
        }
    }
    Accepted {
        gzip: gzip.or(any).unwrap_or(false),
        identity: identity.unwrap_or(any != Some(false)),
        others: others || any == Some(true),
    }
}

/// Picks the coding of an answer; `None` means 406.
///
/// A client that names gzip alone wants it. One that names several codings sends its library's
/// default; compressing then costs more time than the bytes would, so it gets none.
pub fn choose(headers: &HeaderMap, gzip_possible: bool) -> Option<Coding> {
    let accepted = accepted(headers);
    if gzip_possible && accepted.gzip && !(accepted.others && accepted.identity) {
        return Some(Coding::Gzip);
    }
    accepted.identity.then_some(Coding::Identity)
}

/// The coding of an upload.
///
/// Errors: a message for a 400 answer.
pub fn of_upload(headers: &HeaderMap) -> Result<Coding, String> {
    let given = headers
        .get(CONTENT_ENCODING)
        .map(|value| value.to_str().unwrap_or("?").trim());
    match given {
        None | Some("") => Ok(Coding::Identity),
        Some(name) if name.eq_ignore_ascii_case("identity") => Ok(Coding::Identity),
        Some(name) if name.eq_ignore_ascii_case("gzip") => Ok(Coding::Gzip),
        Some(name) => Err(format!(
            "unsupported Content-Encoding: {name}, supported: [identity, gzip]"
        )),
    }
}

/// Unpacks an upload piece by piece.
pub enum Unpacker {
    /// Nothing to do.
    Identity,
    /// Boxed: its window is 32 KiB.
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
}

impl Unpacker {
    /// For a coding.
    pub fn new(coding: Coding) -> Self {
        match coding {
            Coding::Identity => Unpacker::Identity,
            Coding::Gzip => Unpacker::Gzip(Box::new(MultiGzDecoder::new(Vec::new()))),
        }
    }

    /// The most of packed input that one call of `feed` should get: gzip may swell it a
    /// thousandfold.
    pub fn input_bytes_max(&self) -> usize {
        match self {
            Unpacker::Identity => usize::MAX,
            Unpacker::Gzip(_) => 1024,
        }
    }

    /// Takes packed bytes and gives what they hold.
    ///
    /// Errors: `InvalidData` or `InvalidInput` for what is no gzip.
    pub fn feed(&mut self, packed: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Unpacker::Identity => Ok(packed.to_vec()),
            Unpacker::Gzip(decoder) => {
                decoder.write_all(packed)?;
                decoder.flush()?;
                Ok(std::mem::take(decoder.get_mut()))
            }
        }
    }

    /// Takes the end and gives what is left.
    ///
    /// Errors: `UnexpectedEof` if the packed data broke off.
    pub fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Unpacker::Identity => Ok(Vec::new()),
            Unpacker::Gzip(decoder) => decoder.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn pick(value: &str, gzip: bool) -> Option<Coding> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, value.parse().unwrap());
        choose(&headers, gzip)
    }

    #[test]
    fn choices() {
        assert_eq!(choose(&HeaderMap::new(), true), Some(Coding::Identity));
        assert_eq!(pick("gzip", true), Some(Coding::Gzip));
        assert_eq!(pick("gzip;q=0.5", true), Some(Coding::Gzip));
        assert_eq!(pick("gzip", false), Some(Coding::Identity));
        assert_eq!(pick("gzip, deflate, br", true), Some(Coding::Identity));
        assert_eq!(pick("gzip;q=0", true), Some(Coding::Identity));
        assert_eq!(pick("br", true), Some(Coding::Identity));
        assert_eq!(pick("*", true), Some(Coding::Identity));
        assert_eq!(pick("br, identity;q=0", true), None);
        assert_eq!(pick("*;q=0", true), None);
        assert_eq!(pick("gzip, *;q=0", true), Some(Coding::Gzip));
        assert_eq!(pick("gzip, identity;q=0", false), None);
        assert_eq!(pick("identity, *;q=0", true), Some(Coding::Identity));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn gzip_unpacks_however_it_is_cut(
            data in proptest::collection::vec(any::<u8>(), 0..4000),
            cut in 1usize..300,
        ) {
            let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
            packed.write_all(&data).unwrap();
            let packed = packed.finish().unwrap();
            let mut unpacker = Unpacker::new(Coding::Gzip);
            let mut out = Vec::new();
            for piece in packed.chunks(cut) {
                out.extend(unpacker.feed(piece).unwrap());
            }
            out.extend(unpacker.finish().unwrap());
            prop_assert_eq!(&out, &data);
            let mut short = Unpacker::new(Coding::Gzip);
            let cut_off = short.feed(&packed[..packed.len() - 1]).and_then(|_| short.finish());
            prop_assert!(cut_off.is_err());
        }

        #[test]
        fn garbage_is_an_error_or_nothing(data in proptest::collection::vec(any::<u8>(), 1..200)) {
            let mut unpacker = Unpacker::new(Coding::Gzip);
            let _ = unpacker.feed(&data).and_then(|_| unpacker.finish());
        }
    }
}
