// SPDX-License-Identifier: Apache-2.0
//! Follows the frames of a Connect stream without keeping any of its bytes.
//!
//! A Connect streaming body is a row of frames: one byte of flags, four bytes of big-endian
//! length, then that many bytes. Flag bit 1 (`0x02`) marks the end-of-stream frame
//! (<https://connectrpc.com/docs/protocol/#streaming-response>). Knowing where a frame ends lets
//! the edge finish a broken stream with an explicit error in place of a cut-off body.

use bytes::Bytes;

const HEADER_BYTES: usize = 5;
const END_STREAM_FLAG: u8 = 0x02;

/// Position inside a row of frames.
#[derive(Debug, Default)]
pub struct FrameTracker {
    header: [u8; HEADER_BYTES],
    header_len: usize,
    remaining: u32,
    end_seen: bool,
}

impl FrameTracker {
    /// Take note of the next bytes of the stream.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.remaining > 0 {
                let skip = bytes.len().min(self.remaining as usize);
                // `skip` is at most `remaining`, so it fits.
                self.remaining -= skip as u32;
                bytes = &bytes[skip..];
                continue;
            }
            let take = bytes.len().min(HEADER_BYTES - self.header_len);
            self.header[self.header_len..self.header_len + take].copy_from_slice(&bytes[..take]);
            self.header_len += take;
            bytes = &bytes[take..];
            if self.header_len == HEADER_BYTES {
                let [flags, a, b, c, d] = self.header;
                self.remaining = u32::from_be_bytes([a, b, c, d]);
                self.end_seen |= flags & END_STREAM_FLAG != 0;
                self.header_len = 0;
            }
        }
    }

    /// Whether a new frame may start here.
    pub fn at_boundary(&self) -> bool {
        self.remaining == 0 && self.header_len == 0
    }

    /// Whether the end-of-stream frame has passed, at least its header.
    pub fn end_seen(&self) -> bool {
        self.end_seen
    }
}

/// Whether a response with this content type is a row of Connect frames with JSON ends.
pub fn is_connect_stream(content_type: &[u8]) -> bool {
    let kind = content_type
        .split(|&byte| byte == b';')
        .next()
        .unwrap_or_default()
        .trim_ascii();
    kind.eq_ignore_ascii_case(b"application/connect+json")
        || kind.eq_ignore_ascii_case(b"application/connect+proto")
}

/// An end-of-stream frame that says `unavailable` with `message`.
pub fn unavailable_end_frame(message: &str) -> Bytes {
    let body = serde_json::json!({"error": {"code": "unavailable", "message": message}});
    let body = body.to_string().into_bytes();
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    frame.push(END_STREAM_FLAG);
    // Our own messages are short; four bytes always hold their length.
    frame.extend_from_slice(&(body.len() as u32).to_be_bytes());
    frame.extend_from_slice(&body);
    Bytes::from(frame)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
        let mut frame = vec![flags];
        frame.extend_from_slice(&(body.len() as u32).to_be_bytes());
        frame.extend_from_slice(body);
        frame
    }

    #[test]
    fn content_types() {
        assert!(is_connect_stream(b"application/connect+json"));
        assert!(is_connect_stream(
            b"Application/Connect+JSON; charset=utf-8"
        ));
        assert!(!is_connect_stream(b"application/json"));
        assert!(!is_connect_stream(b""));
    }

    #[test]
    fn the_end_frame_is_well_formed() {
        let frame = unavailable_end_frame("the sandbox \"x\" is gone");
        assert_eq!(frame[0], 2);
        let length = u32::from_be_bytes(frame[1..5].try_into().expect("four bytes")) as usize;
        assert_eq!(length, frame.len() - 5);
        let value: serde_json::Value = serde_json::from_slice(&frame[5..]).expect("JSON");
        assert_eq!(value["error"]["code"], "unavailable");
        assert_eq!(value["error"]["message"], "the sandbox \"x\" is gone");
    }

    #[test]
    fn an_end_frame_with_a_body_is_not_at_a_boundary_half_way() {
        let mut tracker = FrameTracker::default();
        tracker.feed(&frame(2, b"{}")[..6]);
        assert!(tracker.end_seen());
        assert!(!tracker.at_boundary());
    }

    proptest! {
        /// However the bytes are cut, boundaries are exactly the ends of frames.
        #[test]
        fn boundaries_are_found_under_any_cut(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..12),
            cuts in prop::collection::vec(1usize..97, 1..40),
            end in any::<bool>(),
        ) {
            let mut wire = Vec::new();
            let mut ends = vec![0];
            let last = bodies.len() - 1;
            for (index, body) in bodies.iter().enumerate() {
                wire.extend(frame(if end && index == last { 2 } else { 0 }, body));
                ends.push(wire.len());
            }
            let mut tracker = FrameTracker::default();
            let mut position = 0;
            let mut cut = cuts.iter().cycle();
            while position < wire.len() {
                prop_assert_eq!(tracker.at_boundary(), ends.contains(&position));
                let next = (position + cut.next().copied().unwrap_or(1)).min(wire.len());
                tracker.feed(&wire[position..next]);
                position = next;
            }
            prop_assert!(tracker.at_boundary());
            prop_assert_eq!(tracker.end_seen(), end);
        }

        /// Arbitrary bytes never make it panic.
        #[test]
        fn arbitrary_bytes_are_harmless(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..32)) {
            let mut tracker = FrameTracker::default();
            for chunk in chunks {
                tracker.feed(&chunk);
            }
        }
    }
}
