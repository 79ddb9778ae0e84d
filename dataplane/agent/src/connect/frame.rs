// SPDX-License-Identifier: Apache-2.0
//! Frames of Connect streams: one byte of flags, four bytes of length (big endian), the message.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::error::{Code, RpcError};
use crate::limits::MESSAGE_BYTES_MAX;

/// Bytes before each message.
pub const HEAD_BYTES: usize = 5;
/// The message is compressed.
const FLAG_COMPRESSED: u8 = 0x01;
/// The message is the end of the stream.
const FLAG_END: u8 = 0x02;

/// One frame of a client's stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message(Bytes),
    /// The client says that it has ended; its content carries nothing for a server.
    End,
}

/// Puts a message into a frame.
pub fn encode_message(json: &[u8]) -> Bytes {
    encode(0, json)
}

/// The last frame of a response stream, with an error or with none.
pub fn encode_end(error: Option<&RpcError>) -> Bytes {
    match error {
        None => encode(FLAG_END, b"{}"),
        Some(err) => {
            let body = serde_json::json!({"error": err.to_json(), "metadata": {}});
            encode(FLAG_END, body.to_string().as_bytes())
        }
    }
}

fn encode(flags: u8, json: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD_BYTES + json.len());
    out.put_u8(flags);
    out.put_u32(u32::try_from(json.len()).expect("messages are far below 4 GiB"));
    out.put_slice(json);
    out.freeze()
}

/// Cuts a byte stream into frames, however the network has cut it.
#[derive(Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    /// Adds what came from the network.
    pub fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// The next whole frame, or `None` if more bytes are needed.
    ///
    /// Errors: `resource_exhausted` for a message over the limit, `unimplemented` for a
    /// compressed one.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, RpcError> {
        if self.buffer.len() < HEAD_BYTES {
            return Ok(None);
        }
        let flags = self.buffer[0];
        let length = u32::from_be_bytes([
            self.buffer[1],
            self.buffer[2],
            self.buffer[3],
            self.buffer[4],
        ]) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(RpcError::exhausted(format!(
                "message of {length} bytes is over the limit of {MESSAGE_BYTES_MAX} bytes"
            )));
        }
        if flags & FLAG_COMPRESSED != 0 {
            return Err(RpcError::new(
                Code::Unimplemented,
                "compressed messages are not supported, send identity",
            ));
        }
        if self.buffer.len() < HEAD_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(HEAD_BYTES);
        let message = self.buffer.split_to(length).freeze();
        Ok(Some(if flags & FLAG_END != 0 {
            Frame::End
        } else {
            Frame::Message(message)
        }))
    }

    /// Whether bytes of an unfinished frame are held.
    pub fn is_partial(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_all(decoder: &mut Decoder) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = decoder.next_frame().expect("valid frames") {
            frames.push(frame);
        }
        frames
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn frames_survive_any_cut(
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..8),
            cuts in proptest::collection::vec(1usize..40, 1..64),
        ) {
            let mut wire = Vec::new();
            for message in &messages {
                wire.extend_from_slice(&encode_message(message));
            }
            wire.extend_from_slice(&encode_end(None));
            let mut decoder = Decoder::default();
            let mut frames = Vec::new();
            let mut rest = &wire[..];
            let mut turn = 0;
            while !rest.is_empty() {
                let take = cuts[turn % cuts.len()].min(rest.len());
                decoder.push(&rest[..take]);
                rest = &rest[take..];
                turn += 1;
                frames.extend(decode_all(&mut decoder));
            }
            let mut expected: Vec<Frame> =
                messages.into_iter().map(|m| Frame::Message(Bytes::from(m))).collect();
            expected.push(Frame::End);
            prop_assert_eq!(frames, expected);
            prop_assert!(!decoder.is_partial());
        }

        #[test]
        fn garbage_never_panics(data in proptest::collection::vec(any::<u8>(), 0..256)) {
            let mut decoder = Decoder::default();
            decoder.push(&data);
            for _ in 0..64 {
                match decoder.next_frame() {
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => break,
                }
            }
        }
    }

    #[test]
    fn refuses_an_absurd_length_before_it_is_buffered() {
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(
            decoder.next_frame().unwrap_err().code,
            Code::ResourceExhausted
        );
    }

    #[test]
    fn end_frame_carries_the_error() {
        let frame = encode_end(Some(&RpcError::new(Code::DeadlineExceeded, "over")));
        assert_eq!(frame[0], 2);
        let body: serde_json::Value = serde_json::from_slice(&frame[HEAD_BYTES..]).unwrap();
        assert_eq!(body["error"]["code"], "deadline_exceeded");
    }
}
