// SPDX-License-Identifier: Apache-2.0
//! Guessing content types and naming files in headers.

use std::fmt::Write;

const TEXT: &str = "text/plain; charset=utf-8";
const BINARY: &str = "application/octet-stream";
/// A character may be cut at the end of the looked-at bytes.
const UTF8_BYTES_MAX: usize = 4;

/// By the name's ending, else by the first bytes of the content.
pub fn guess(name: &str, start: &[u8]) -> &'static str {
    let ending = name
        .rsplit_once('.')
        .map(|(_, ending)| ending.to_ascii_lowercase());
    by_ending(ending.as_deref().unwrap_or_default()).unwrap_or_else(|| by_content(start))
}

fn by_ending(ending: &str) -> Option<&'static str> {
    Some(match ending {
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "md" => "text/markdown; charset=utf-8",
        "xml" => "text/xml; charset=utf-8",
        "txt" | "log" | "py" | "rs" | "go" | "c" | "h" | "sh" | "toml" | "yaml" | "yml" => TEXT,
        "json" => "application/json",
        "pdf" => "application/pdf",
        "wasm" => "application/wasm",
        "zip" => "application/zip",
        "gz" | "tgz" => "application/gzip",
        "tar" => "application/x-tar",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "avif" => "image/avif",
        "svg" => "image/svg+xml",
        "ico" => "image/x-icon",
        "mp3" => "audio/mpeg",
        "wav" => "audio/wav",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        "woff2" => "font/woff2",
        _ => return None,
    })
}

fn by_content(start: &[u8]) -> &'static str {
    let is_text = match std::str::from_utf8(start) {
        Ok(_) => true,
        Err(err) => err.error_len().is_none() && start.len() - err.valid_up_to() < UTF8_BYTES_MAX,
    };
    let control = |byte: &u8| *byte < 0x20 && !matches!(*byte, b'\t' | b'\n' | b'\r' | 0x0c | 0x1b);
    if is_text && !start.iter().any(control) {
        TEXT
    } else {
        BINARY
    }
}

/// `Content-Disposition: inline` with a file name (RFC 6266, RFC 8187).
pub fn disposition(name: &str) -> String {
    let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&b);
    if name.bytes().all(is_token) && !name.is_empty() {
        return format!("inline; filename={name}");
    }
    if name.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        let quoted = name.replace('\\', "\\\\").replace('"', "\\\"");
        return format!("inline; filename=\"{quoted}\"");
    }
    let mut text = String::from("inline; filename*=utf-8''");
    for byte in name.bytes() {
        if is_token(byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types() {
        assert_eq!(guess("a.PNG", b""), "image/png");
        assert_eq!(guess("noext", b"plain \xc3\xa4"), TEXT);
        assert_eq!(guess("noext", b"cut \xc3"), TEXT);
        assert_eq!(guess("noext", b"\x00\x01"), BINARY);
        assert_eq!(guess("a.b.c.unknown", b"\xff\xff\xff\xff\xff"), BINARY);
    }

    #[test]
    fn dispositions() {
        assert_eq!(disposition("a.txt"), "inline; filename=a.txt");
        assert_eq!(disposition("a b\".txt"), "inline; filename=\"a b\\\".txt\"");
        assert_eq!(disposition("ä\n"), "inline; filename*=utf-8''%C3%A4%0A");
    }
}
