// SPDX-License-Identifier: Apache-2.0
//! `GET /files`.

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    IF_RANGE, LAST_MODIFIED, RANGE, VARY,
};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::mpsc;

use super::encoding::{self, Coding};
use super::range::{self, Range};
use super::{FileError, authorize, content_type, file_user};
use crate::agent::{Agent, StreamGuard};
use crate::http::body::{Reply, ReplyBody};
use crate::http::query::Query;
use crate::limits::{FILE_CHUNK_BYTES, STREAM_STALL_MAX};
use crate::paths::{base_name, resolve};
use crate::sys::pool;

/// Bytes that the content type is guessed from.
const SNIFF_BYTES: usize = 512;
/// Pieces between disk and network.
const QUEUE_PIECES: usize = 2;
const CONDITIONAL: [HeaderName; 4] = [RANGE, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE];

/// An open file and what is known of it.
struct Opened {
    file: File,
    meta: Metadata,
    name: String,
    /// The first bytes, read for the content type.
    start: Vec<u8>,
}

/// Serves the route.
pub async fn serve(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    let head_only = request.method() == Method::HEAD;
    match answer(agent, request.uri().query(), request.headers(), head_only).await {
        Ok(reply) => reply,
        Err(err) => err.reply(),
    }
}

async fn answer(
    agent: &Arc<Agent>,
    query: Option<&str>,
    headers: &HeaderMap,
    head_only: bool,
) -> Result<Reply, FileError> {
    let query = Query::parse(query);
    authorize(agent, headers, &query, "read")?;
    let opener = Arc::clone(agent);
    let asked = headers.clone();
    let opened = pool::run(move || open(&opener, &asked, &query))
        .await
        .map_err(|err| FileError::from_io("reading", &err))??;
    let conditional = CONDITIONAL.iter().any(|name| headers.contains_key(name));
    let coding = encoding::choose(headers, !conditional).ok_or_else(|| {
        let message = "no acceptable encoding found, supported: [identity, gzip]";
        FileError::new(StatusCode::NOT_ACCEPTABLE, message)
    })?;
    let mut reply = Response::new(ReplyBody::empty());
    let etag = describe(&mut reply, &opened);
    if is_unchanged(headers, &opened.meta, &etag) {
        *reply.status_mut() = StatusCode::NOT_MODIFIED;
        reply.headers_mut().remove(CONTENT_TYPE);
        return Ok(reply);
    }
    let guard = agent.open_stream()?;
    let agent = Arc::clone(agent);
    if coding == Coding::Gzip {
        reply
            .headers_mut()
            .insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        if !head_only {
            *reply.body_mut() = send(agent, guard, opened, None, Coding::Gzip);
        }
        return Ok(reply);
    }
    let size = opened.meta.len();
    // Files of /proc and /sys say that they are empty. Their length shows when they are read.
    if size == 0 && !opened.start.is_empty() {
        if !head_only {
            *reply.body_mut() = send(agent, guard, opened, None, Coding::Identity);
        }
        return Ok(reply);
    }
    let wanted = headers
        .get(RANGE)
        .filter(|_| range_applies(headers, &opened.meta, &etag));
    let range = range::parse(wanted.and_then(|value| value.to_str().ok()), size);
    reply
        .headers_mut()
        .insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let (start, length) = match range {
        Range::Whole => (0, size),
        Range::Part { start, length } => {
            *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
            let span = format!("bytes {start}-{}/{size}", start + length - 1);
            insert(&mut reply, CONTENT_RANGE, &span);
            (start, length)
        }
        Range::Unsatisfiable => {
            let message = "the range cannot be served: give one range within the file";
            let err = FileError::new(StatusCode::RANGE_NOT_SATISFIABLE, message);
            let mut reply = err.reply();
            insert(&mut reply, CONTENT_RANGE, &format!("bytes */{size}"));
            return Ok(reply);
        }
    };
    reply.headers_mut().insert(CONTENT_LENGTH, length.into());
    if !head_only && length > 0 {
        *reply.body_mut() = send(
            agent,
            guard,
            opened,
            Some((start, length)),
            Coding::Identity,
        );
    }
    Ok(reply)
}

fn open(agent: &Arc<Agent>, headers: &HeaderMap, query: &Query) -> Result<Opened, FileError> {
    let user = file_user(agent, headers, query.get("username"))?;
    let given = query.get("path").unwrap_or_default();
    let path = resolve(given, &user, agent.default_dir().as_deref())?;
    // Not blocking: a FIFO would wait for a writer that never comes.
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&path);
    let mut file = opened.map_err(|err| match err.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => FileError::new(
            StatusCode::NOT_FOUND,
            format!("path '{path}' does not exist"),
        ),
        _ if err.raw_os_error() == Some(libc::ENXIO) => not_regular(&path),
        _ => FileError::from_io(&format!("error opening file '{path}'"), &err),
    })?;
    let failed = |err: io::Error| FileError::from_io(&format!("error reading file '{path}'"), &err);
    let meta = file.metadata().map_err(failed)?;
    if meta.is_dir() {
        return Err(FileError::bad(format!("path '{path}' is a directory")));
    }
    if !meta.is_file() {
        return Err(not_regular(&path));
    }
    let mut start = vec![0; SNIFF_BYTES];
    let length = file.read(&mut start).map_err(failed)?;
    start.truncate(length);
    Ok(Opened {
        file,
        meta,
        name: base_name(&path).to_owned(),
        start,
    })
}

fn not_regular(path: &str) -> FileError {
    FileError::bad(format!("path '{path}' is not a regular file"))
}

fn insert(reply: &mut Reply, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
}

/// Sets the headers that every answer about the file has; gives its entity tag.
fn describe(reply: &mut Reply, opened: &Opened) -> String {
    let meta = &opened.meta;
    let etag = format!(
        "\"{:x}.{:x}-{:x}-{:x}\"",
        meta.mtime(),
        meta.mtime_nsec(),
        meta.len(),
        meta.ino()
    );
    insert(reply, ETAG, &etag);
    if let Ok(time) = meta.modified() {
        // The HTTP date has no years before 1970 and none after 9999.
        if time >= SystemTime::UNIX_EPOCH && meta.mtime() < 253_402_300_800 {
            insert(reply, LAST_MODIFIED, &httpdate::fmt_http_date(time));
        }
    }
    insert(
        reply,
        CONTENT_DISPOSITION,
        &content_type::disposition(&opened.name),
    );
    insert(
        reply,
        CONTENT_TYPE,
        content_type::guess(&opened.name, &opened.start),
    );
    reply
        .headers_mut()
        .insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    etag
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Whether the file has changed after an HTTP date; dates have whole seconds.
fn changed_since(meta: &Metadata, date: &str) -> Option<bool> {
    let since = httpdate::parse_http_date(date).ok()?;
    let since_s = since.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    Some(meta.mtime() > i64::try_from(since_s).unwrap_or(i64::MAX))
}

/// RFC 9110, section 13.1: `If-None-Match` decides if it is there, else `If-Modified-Since`.
fn is_unchanged(headers: &HeaderMap, meta: &Metadata, etag: &str) -> bool {
    if let Some(tags) = text(headers, &IF_NONE_MATCH) {
        return tags
            .split(',')
            .map(str::trim)
            .any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag) == etag);
    }
    let since = text(headers, &IF_MODIFIED_SINCE);
    since.and_then(|date| changed_since(meta, date)) == Some(false)
}

/// `If-Range`: the range counts only for the version that the client knows.
fn range_applies(headers: &HeaderMap, meta: &Metadata, etag: &str) -> bool {
    match text(headers, &IF_RANGE) {
        None => !headers.contains_key(IF_RANGE),
        Some(known) if known.starts_with('"') => known == etag,
        Some(date) => changed_since(meta, date) == Some(false),
    }
}

/// Starts reading. A span must be sent in full: a file that shrinks breaks the connection.
fn send(
    agent: Arc<Agent>,
    guard: StreamGuard,
    opened: Opened,
    span: Option<(u64, u64)>,
    coding: Coding,
) -> ReplyBody {
    let (queue, pieces) = mpsc::channel(QUEUE_PIECES);
    let source = Source {
        file: opened.file,
        left: span.map(|(_, length)| length),
        seek: Some(span.map_or(0, |(start, _)| start)),
        gzip: (coding == Coding::Gzip).then(|| GzEncoder::new(Vec::new(), Compression::fast())),
    };
    tokio::spawn(async move {
        let _guard = guard;
        let mut source = source;
        loop {
            let (back, piece) = match pool::run(move || source.next()).await {
                Ok(next) => next,
                Err(err) => {
                    let _ = queue.send(Err(err)).await;
                    return;
                }
            };
            source = back;
            agent.touch();
            let Some(piece) = piece.transpose() else {
                return;
            };
            let failed = piece.is_err();
            if queue.send_timeout(piece, STREAM_STALL_MAX).await.is_err() || failed {
                return;
            }
        }
    });
    ReplyBody::Pieces(pieces)
}

/// The file's side of a download. Goes to a worker and back for each piece.
struct Source {
    file: File,
    left: Option<u64>,
    seek: Option<u64>,
    /// Taken when the end of the file is reached.
    gzip: Option<GzEncoder<Vec<u8>>>,
}

impl Source {
    fn next(mut self) -> (Self, io::Result<Option<Bytes>>) {
        let piece = self.read();
        (self, piece)
    }

    fn read(&mut self) -> io::Result<Option<Bytes>> {
        if let Some(offset) = self.seek.take() {
            self.file.seek(SeekFrom::Start(offset))?;
        }
        let packed = self.gzip.is_some();
        loop {
            let plain = self.read_plain()?;
            if !packed {
                return Ok(plain);
            }
            let Some(encoder) = &mut self.gzip else {
                return Ok(None);
            };
            match plain {
                Some(plain) => {
                    encoder.write_all(&plain)?;
                    if !encoder.get_ref().is_empty() {
                        return Ok(Some(std::mem::take(encoder.get_mut()).into()));
                    }
                }
                None => {
                    return self
                        .gzip
                        .take()
                        .map(GzEncoder::finish)
                        .transpose()
                        .map(|last| last.map(Bytes::from));
                }
            }
        }
    }

    fn read_plain(&mut self) -> io::Result<Option<Bytes>> {
        let chunk = FILE_CHUNK_BYTES as u64;
        let most = self.left.unwrap_or(chunk).min(chunk);
        if most == 0 {
            return Ok(None);
        }
        let mut buffer = Vec::with_capacity(FILE_CHUNK_BYTES);
        (&self.file).take(most).read_to_end(&mut buffer)?;
        if buffer.is_empty() {
            return match self.left {
                Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
                None => Ok(None),
            };
        }
        if let Some(left) = &mut self.left {
            *left -= buffer.len() as u64;
        }
        Ok(Some(buffer.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(mut source: Source) -> Vec<u8> {
        let mut out = Vec::new();
        loop {
            let (back, piece) = source.next();
            source = back;
            match piece.unwrap() {
                Some(piece) => out.extend_from_slice(&piece),
                None => return out,
            }
        }
    }

    #[test]
    fn spans_and_gzip() {
        let dir = crate::testing::TempDir::new();
        let path = dir.path().join("f");
        let data: Vec<u8> = (0..600_000u32).map(|n| (n % 251) as u8).collect();
        std::fs::write(&path, &data).unwrap();
        let source = |left, seek, gzip: bool| Source {
            file: File::open(&path).unwrap(),
            left,
            seek: Some(seek),
            gzip: gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
        };
        assert_eq!(drain(source(Some(300_001), 7, false)), &data[7..300_008]);
        assert_eq!(drain(source(None, 0, false)), data);
        let packed = drain(source(None, 0, true));
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&packed[..])
            .read_to_end(&mut plain)
            .unwrap();
        assert_eq!(plain, data);
        let (_, short) = source(Some(5), 600_000, false).next();
        assert_eq!(short.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
