// SPDX-License-Identifier: Apache-2.0
//! A compressed stream, decompressed and digested in one pass.
//!
//! Three threads share the work: one reads, digests and decompresses, one digests what came out,
//! and the caller uses it. Pieces go from hand to hand without being copied.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Bytes decompressed at once.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces that wait to be taken, in each of two queues.
const PIECES_WAITING: usize = 8;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// A zstd stream may begin with a skippable frame of magic `0x184D2A5?` (RFC 8878, 3.1.2).
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];
/// Largest window that a zstd stream may ask memory for, as a power of two: zstd's own `--ultra`
/// uses as much.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

type Piece = io::Result<Arc<Vec<u8>>>;

/// SHA-256 digests of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digests {
    /// Of the bytes as they came.
    pub blob: String,
    /// Of the bytes decompressed.
    pub diff: String,
}

/// The decompressed stream.
pub struct Stream {
    pieces: Option<Receiver<Piece>>,
    current: Arc<Vec<u8>>,
    used: usize,
    reader: JoinHandle<String>,
    hasher: JoinHandle<String>,
}

impl Stream {
    /// Begins to read.
    ///
    /// Errors: the system has no threads.
    pub fn new(input: Box<dyn Read + Send>) -> Result<Self> {
        let failed = |err: io::Error| Error::system("cannot start a thread", err);
        let (to_caller, pieces) = sync_channel(PIECES_WAITING);
        let (to_hasher, hashed) = sync_channel::<Arc<Vec<u8>>>(PIECES_WAITING);
        let hasher = std::thread::Builder::new()
            .spawn(move || {
                let mut sum = Sha256::new();
                for piece in hashed {
                    sum.update(&*piece);
                }
                format_digest(sum)
            })
            .map_err(failed)?;
        let reader = std::thread::Builder::new()
            .spawn(move || read(input, &to_caller, &to_hasher))
            .map_err(failed)?;
        Ok(Self {
            pieces: Some(pieces),
            current: Arc::default(),
            used: 0,
            reader,
            hasher,
        })
    }

    /// The digests. What has not been taken yet is not decompressed any more, but the rest of the
    /// input still counts for the blob's digest.
    ///
    /// Errors: a thread panicked.
    pub fn finish(mut self) -> Result<Digests> {
        self.pieces = None;
        let failed = |_| Error::new(crate::Kind::Other, "a thread failed");
        Ok(Digests {
            blob: self.reader.join().map_err(failed)?,
            diff: self.hasher.join().map_err(failed)?,
        })
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let have = self.fill_buf()?;
        let len = have.len().min(out.len());
        out[..len].copy_from_slice(&have[..len]);
        self.consume(len);
        Ok(len)
    }
}

impl BufRead for Stream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.used == self.current.len() {
            let Some(next) = self.pieces.as_ref().and_then(|pieces| pieces.recv().ok()) else {
                return Ok(&[]);
            };
            (self.current, self.used) = (next?, 0);
        }
        Ok(&self.current[self.used..])
    }

    fn consume(&mut self, len: usize) {
        self.used = (self.used + len).min(self.current.len());
    }
}

/// Reads and decompresses all; the digest of what was read.
fn read(
    input: Box<dyn Read + Send>,
    to_caller: &SyncSender<Piece>,
    to_hasher: &SyncSender<Arc<Vec<u8>>>,
) -> String {
    let mut input = BufReader::with_capacity(PIECE_BYTES, Digesting::new(input));
    if let Err(err) = decompress(&mut input, to_caller, to_hasher) {
        // A caller that is gone does not care.
        let _ = to_caller.send(Err(err));
    }
    // After an error the digest still tells a damaged blob from a bad one.
    while input.fill_buf().is_ok_and(|rest| !rest.is_empty()) {
        let len = input.buffer().len();
        input.consume(len);
    }
    format_digest(input.into_inner().sum)
}

fn decompress<R: BufRead>(
    input: &mut R,
    to_caller: &SyncSender<Piece>,
    to_hasher: &SyncSender<Arc<Vec<u8>>>,
) -> io::Result<()> {
    let head = input.fill_buf()?;
    let is_zstd = head.starts_with(&ZSTD_MAGIC)
        || head.len() >= 4 && head[0] & 0xf0 == 0x50 && head[1..4] == ZSTD_SKIPPABLE;
    let mut out: Box<dyn Read + '_> = if head.starts_with(&GZIP_MAGIC) {
        Box::new(MultiGzDecoder::new(input))
    } else if is_zstd {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
        Box::new(decoder)
    } else {
        Box::new(input)
    };
    loop {
        let mut piece = vec![0; PIECE_BYTES];
        let mut len = 0;
        let mut end = Ok(false);
        while len < PIECE_BYTES {
            match out.read(&mut piece[len..]) {
                Ok(0) => {
                    end = Ok(true);
                    break;
                }
                Ok(more) => len += more,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => {
                    end = Err(err);
                    break;
                }
            }
        }
        piece.truncate(len);
        let piece = Arc::new(piece);
        let _ = to_hasher.send(Arc::clone(&piece));
        if to_caller.send(Ok(piece)).is_err() || end? {
            return Ok(());
        }
    }
}

/// A reader that digests what goes through it.
struct Digesting {
    input: Box<dyn Read + Send>,
    sum: Sha256,
}

impl Digesting {
    fn new(input: Box<dyn Read + Send>) -> Self {
        Self {
            input,
            sum: Sha256::new(),
        }
    }
}

impl Read for Digesting {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.input.read(out)?;
        self.sum.update(&out[..len]);
        Ok(len)
    }
}

/// A digest as OCI writes it.
pub fn format_digest(sum: Sha256) -> String {
    let mut text = String::from("sha256:");
    for byte in sum.finalize() {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
