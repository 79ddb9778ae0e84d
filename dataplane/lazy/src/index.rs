// SPDX-License-Identifier: Apache-2.0
//! The index of a layer: its length and the SHA-256 of each chunk.
//!
//! ```text
//! 0   8 bytes  "ODLAZY01"
//! 8   u32 LE   bytes of a chunk, a power of two
//! 12  u32 LE   0
//! 16  u64 LE   bytes of the layer
//! 24  32 bytes per chunk: SHA-256 of it; the last chunk may be shorter
//! ```
//!
//! A layer is named by the SHA-256 of its index: whoever has that name can check all of it.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"ODLAZY01";
const HEAD: usize = 24;
const SUM: usize = 32;
/// Chunks may be as small as a page.
pub const CHUNK_BYTES_MIN: u32 = 4096;
/// A chunk is read into memory whole.
pub const CHUNK_BYTES_MAX: u32 = 4 << 20;
/// Layers may be this long.
pub const SIZE_MAX: u64 = 1 << 40;

/// SHA-256 of one chunk.
pub type Sum = [u8; SUM];

/// What a layer holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// Bytes of the layer.
    pub size: u64,
    /// Bytes of each chunk but the last.
    pub chunk_bytes: u32,
    /// One per chunk.
    pub sums: Vec<Sum>,
}

impl Index {
    /// Make the index of a layer's file.
    pub fn of(file: &mut impl Read, chunk_bytes: u32) -> Result<Self> {
        check_chunk_bytes(chunk_bytes)?;
        let mut index = Index {
            size: 0,
            chunk_bytes,
            sums: Vec::new(),
        };
        let mut chunk = Vec::with_capacity(chunk_bytes as usize);
        loop {
            chunk.clear();
            file.take(u64::from(chunk_bytes))
                .read_to_end(&mut chunk)
                .map_err(|e| Error::io("cannot read the layer", &e))?;
            if chunk.is_empty() {
                return Ok(index);
            }
            index.size += chunk.len() as u64;
            index.sums.push(Sha256::digest(&chunk).into());
        }
    }

    /// Read an index.
    pub fn parse(data: &[u8]) -> Result<Self> {
        let bad = |what: &str| Error::new(format!("not an index of a layer: {what}"));
        if data.len() < HEAD || &data[..8] != MAGIC {
            return Err(bad("it begins differently"));
        }
        let u32_at =
            |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().unwrap_or_default());
        let chunk_bytes = u32_at(8);
        check_chunk_bytes(chunk_bytes)?;
        let size = u64::from_le_bytes(data[16..24].try_into().unwrap_or_default());
        if size == 0 || size > SIZE_MAX || u32_at(12) != 0 {
            return Err(bad("impossible length"));
        }
        let (sums, rest) = data[HEAD..].as_chunks::<SUM>();
        if !rest.is_empty() || sums.len() as u64 != size.div_ceil(u64::from(chunk_bytes)) {
            return Err(bad("it is cut off, or too long"));
        }
        Ok(Index {
            size,
            chunk_bytes,
            sums: sums.to_vec(),
        })
    }

    /// The index as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + self.sums.len() * SUM);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&self.chunk_bytes.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend(self.sums.iter().flatten());
        out
    }

    /// Write it to a new file, onto the disk.
    pub fn write(&self, path: &Path) -> Result<()> {
        let told = |e: std::io::Error| Error::io(path.display(), &e);
        let mut file = BufWriter::new(File::create_new(path).map_err(told)?);
        file.write_all(&self.to_bytes()).map_err(told)?;
        let file = file.into_inner().map_err(|e| told(e.into_error()))?;
        file.sync_all().map_err(told)
    }

    /// The layer's name: SHA-256 of the index, hex.
    pub fn name(&self) -> String {
        hex(&Sha256::digest(self.to_bytes()))
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u32 {
        // SIZE_MAX over CHUNK_BYTES_MIN fits.
        u32::try_from(self.sums.len()).unwrap_or(u32::MAX)
    }

    /// Where a chunk begins.
    pub fn start(&self, chunk: u32) -> u64 {
        u64::from(chunk) * u64::from(self.chunk_bytes)
    }

    /// Length of a chunk.
    pub fn len_of(&self, chunk: u32) -> usize {
        (self.size - self.start(chunk)).min(u64::from(self.chunk_bytes)) as usize
    }

    /// Whether these bytes are that chunk.
    pub fn is(&self, chunk: u32, data: &[u8]) -> bool {
        data.len() == self.len_of(chunk)
            && Sum::from(Sha256::digest(data)) == self.sums[chunk as usize]
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check_chunk_bytes(value: u32) -> Result<()> {
    if value.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&value) {
        return Ok(());
    }
    Err(Error::new(format!(
        "chunks have a power of two of bytes, from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_comes_back_as_it_was_written() {
        let data: Vec<u8> = (0..10_000u32).map(|n| (n / 7) as u8).collect();
        let index = Index::of(&mut data.as_slice(), 4096).unwrap();
        assert_eq!(
            (index.size, index.chunks(), index.len_of(2)),
            (10_000, 3, 1808)
        );
        assert_eq!(Index::parse(&index.to_bytes()).unwrap(), index);
        assert!(index.is(0, &data[..4096]));
        assert!(!index.is(1, &data[..4096]));
        assert!(!index.is(0, &data[..4095]));
    }

    #[test]
    fn a_damaged_index_is_refused() {
        let whole = Index::of(&mut [7u8; 9000].as_slice(), 4096)
            .unwrap()
            .to_bytes();
        for cut in 0..whole.len() {
            assert!(Index::parse(&whole[..cut]).is_err(), "cut at {cut}");
        }
        for (at, value) in [(0, 0u8), (8, 1), (11, 0xff), (12, 1), (16, 0), (23, 1)] {
            let mut bad = whole.clone();
            bad[at] = value;
            if bad != whole && at != 16 {
                assert!(Index::parse(&bad).is_err(), "byte {at}");
            }
        }
        let mut longer = whole;
        longer.extend([0; 32]);
        assert!(Index::parse(&longer).is_err());
    }
}
