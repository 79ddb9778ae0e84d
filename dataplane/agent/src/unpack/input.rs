// SPDX-License-Identifier: Apache-2.0
//! The body of a call as a blocking stream, decompressed.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use bytes::{Buf, Bytes, BytesMut};
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use tokio::sync::mpsc;

use crate::limits::FILE_CHUNK_BYTES;

/// A piece of the body.
pub enum Piece {
    /// Bytes of it.
    Data(Bytes),
    /// Its end. Without one, the caller is gone.
    End,
}

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Also a frame to skip may come first: magic `0x184D2A5?` (RFC 8878, 3.1.2).
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

/// The body, as it came.
pub struct Body {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    ended: bool,
}

impl Body {
    /// Of a channel of pieces.
    pub fn new(pieces: mpsc::Receiver<Piece>) -> Self {
        Self {
            pieces,
            current: Bytes::new(),
            ended: false,
        }
    }

    /// The body decompressed by gzip or zstd, if it looks so. Only on a thread that may block.
    ///
    /// Errors: the caller is gone.
    pub fn decompressed(mut self) -> io::Result<Box<dyn BufRead>> {
        let mut head = BytesMut::new();
        while head.len() < ZSTD_MAGIC.len() {
            let more = self.fill_buf()?;
            if more.is_empty() {
                break;
            }
            head.extend_from_slice(more);
            self.current.clear();
        }
        self.current = head.freeze();
        let head = &self.current[..];
        let is_zstd = head.starts_with(&ZSTD_MAGIC)
            || head.len() >= 4 && head[0] & 0xf0 == 0x50 && head[1..4] == ZSTD_SKIPPABLE;
        let buffered = |decoder: Box<dyn Read>| -> Box<dyn BufRead> {
            Box::new(BufReader::with_capacity(FILE_CHUNK_BYTES, decoder))
        };
        Ok(if head.starts_with(&GZIP_MAGIC) {
            buffered(Box::new(MultiGzDecoder::new(self)))
        } else if is_zstd {
            buffered(Box::new(Zstd {
                input: self,
                decoder: None,
            }))
        } else {
            Box::new(self)
        })
    }
}

impl Read for Body {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let have = self.fill_buf()?;
        let len = have.len().min(out.len());
        out[..len].copy_from_slice(&have[..len]);
        self.consume(len);
        Ok(len)
    }
}

impl BufRead for Body {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.current.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Piece::Data(data)) => self.current = data,
                Some(Piece::End) => self.ended = true,
                None => return Err(ErrorKind::UnexpectedEof.into()),
            }
        }
        Ok(&self.current)
    }

    fn consume(&mut self, len: usize) {
        self.current.advance(len.min(self.current.len()));
    }
}

/// A zstd stream: frame after frame.
struct Zstd {
    input: Body,
    /// Of the frame that is being read.
    decoder: Option<Box<FrameDecoder>>,
}

impl Zstd {
    /// Begins the next frame; `false` at the end.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.input.fill_buf()?.is_empty() {
            let mut decoder = Box::new(FrameDecoder::new());
            match decoder.init(&mut self.input) {
                Ok(()) => {
                    self.decoder = Some(decoder);
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let mut skipped = (&mut self.input).take(length.into());
                    if io::copy(&mut skipped, &mut io::sink())? != u64::from(length) {
                        return Err(ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(err) => return Err(damaged(err)),
            }
        }
        Ok(false)
    }
}

impl Read for Zstd {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(decoder) = &mut self.decoder else {
                if self.begin()? {
                    continue;
                }
                return Ok(0);
            };
            while decoder.can_collect() < out.len() && !decoder.is_finished() {
                let wanted = out.len() - decoder.can_collect();
                let strategy = BlockDecodingStrategy::UptoBytes(wanted);
                decoder
                    .decode_blocks(&mut self.input, strategy)
                    .map_err(damaged)?;
            }
            let len = decoder.read(out)?;
            if len > 0 || out.is_empty() {
                return Ok(len);
            }
            let wanted = decoder.get_checksum_from_data();
            if wanted.is_some() && wanted != decoder.get_calculated_checksum() {
                return Err(io::Error::new(ErrorKind::InvalidData, "wrong checksum"));
            }
            self.decoder = None;
        }
    }
}

fn damaged(err: FrameDecoderError) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, err.to_string())
}
