// SPDX-License-Identifier: Apache-2.0
//! `POST /files`: one raw body, or a form with several files.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::{Request, StatusCode};
use serde_json::{Value, json};

use super::encoding::{Unpacker, of_upload};
use super::multipart::{Multipart, PartHead, Piece};
use super::sink::Sink;
use super::{FileError, authorize, file_user};
use crate::agent::Agent;
use crate::fs::metadata::{self, Metadata};
use crate::http::body::{Reply, json as json_reply};
use crate::http::query::Query;
use crate::limits::{FILE_CHUNK_BYTES, UPLOAD_FILES_MAX};
use crate::paths::{base_name, resolve};
use crate::sys::pool;
use crate::users::User;

/// How long the rest of a refused body is read, so that the client gets to read the refusal.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);
const FILE_FIELD: &str = "file";

/// Serves the route.
pub async fn serve(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    let (head, body) = request.into_parts();
    let query = Query::parse(head.uri.query());
    let mut body = UploadBody {
        agent: Arc::clone(agent),
        body,
        unpacker: None,
        rest: Bytes::new(),
    };
    match receive(agent, &head.headers, &query, &mut body).await {
        Ok(entries) => json_reply(StatusCode::OK, Value::from(entries).to_string()),
        Err(err) => {
            tokio::spawn(tokio::time::timeout(DRAIN_TIME_MAX, body.drain()));
            err.reply()
        }
    }
}

async fn receive(
    agent: &Arc<Agent>,
    headers: &HeaderMap,
    query: &Query,
    body: &mut UploadBody,
) -> Result<Vec<Value>, FileError> {
    authorize(agent, headers, query, "write")?;
    let _open = agent.open_stream()?;
    let coding = of_upload(headers).map_err(FileError::bad)?;
    body.unpacker = Some(Unpacker::new(coding));
    let metadata = metadata::from_headers(headers)
        .map_err(|message| FileError::bad(format!("invalid metadata: {message}")))?;
    let (known, asked) = (Arc::clone(agent), headers.clone());
    let name = query.get("username").map(str::to_owned);
    let user = pool::run(move || file_user(&known, &asked, name.as_deref()))
        .await
        .map_err(|err| FileError::from_io("looking up the user", &err))??;
    let upload = Upload {
        user,
        default_dir: agent.default_dir(),
        metadata: Arc::new(metadata),
        entries: Vec::new(),
    };
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let media = kind
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    let path = query.get("path");
    if media == "application/octet-stream" {
        let path = path.ok_or_else(|| {
            FileError::bad("path query parameter is required for raw body upload")
        })?;
        upload.raw(path, body).await
    } else if media.starts_with("multipart/") {
        upload.form(kind, path, body).await
    } else {
        Err(FileError::bad(format!(
            "unsupported content type: {kind}, expected multipart/form-data or \
             application/octet-stream"
        )))
    }
}

/// The unpacked bytes of a request.
struct UploadBody {
    agent: Arc<Agent>,
    body: Incoming,
    unpacker: Option<Unpacker>,
    /// Received and not yet unpacked.
    rest: Bytes,
}

impl UploadBody {
    async fn next(&mut self) -> Result<Option<Bytes>, FileError> {
        let packed =
            |err: io::Error| FileError::bad(format!("error decompressing request body: {err}"));
        loop {
            if !self.rest.is_empty() {
                let Some(unpacker) = &mut self.unpacker else {
                    return Ok(None);
                };
                if matches!(unpacker, Unpacker::Identity) {
                    return Ok(Some(std::mem::take(&mut self.rest)));
                }
                let take = self.rest.len().min(unpacker.input_bytes_max());
                let data = unpacker.feed(&self.rest.split_to(take)).map_err(packed)?;
                if !data.is_empty() {
                    return Ok(Some(data.into()));
                }
                continue;
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    self.agent.touch();
                    self.rest = frame.into_data().unwrap_or_default();
                }
                Some(Err(err)) => {
                    return Err(FileError::bad(format!("the request body broke off: {err}")));
                }
                None => {
                    let last = self.unpacker.take().map(Unpacker::finish).transpose();
                    let last = last.map_err(packed)?.unwrap_or_default();
                    return Ok((!last.is_empty()).then(|| last.into()));
                }
            }
        }
    }

    async fn drain(mut self) {
        while let Some(Ok(_)) = self.body.frame().await {}
    }
}

/// One request's files.
struct Upload {
    user: User,
    default_dir: Option<String>,
    metadata: Arc<Metadata>,
    entries: Vec<Value>,
}

impl Upload {
    async fn raw(mut self, path: &str, body: &mut UploadBody) -> Result<Vec<Value>, FileError> {
        let path = resolve(path, &self.user, self.default_dir.as_deref())?;
        let mut file = FileWriter::open(&path, &self.user).await?;
        while let Some(data) = body.next().await? {
            file.write(&data).await?;
        }
        self.entries.push(file.finish(&self.metadata).await?);
        Ok(self.entries)
    }

    async fn form(
        mut self,
        content_type: &str,
        path: Option<&str>,
        body: &mut UploadBody,
    ) -> Result<Vec<Value>, FileError> {
        let broken = |message: &str| FileError::bad(format!("error reading form: {message}"));
        let mut form = Multipart::new(content_type).map_err(broken)?;
        let mut open: Option<FileWriter> = None;
        while let Some(data) = body.next().await? {
            form.push(&data);
            while let Some(piece) = form.next_piece().map_err(broken)? {
                match piece {
                    Piece::Head(head) => open = self.begin_part(&head, path).await?,
                    Piece::Data(data) => {
                        if let Some(file) = &mut open {
                            file.write(&data).await?;
                        }
                    }
                    Piece::PartEnd => {
                        if let Some(file) = open.take() {
                            self.entries.push(file.finish(&self.metadata).await?);
                        }
                    }
                    Piece::End => {}
                }
            }
        }
        if !form.is_whole() {
            return Err(broken("it broke off before its end"));
        }
        Ok(self.entries)
    }

    /// Opens the file of a part; other fields of the form are skipped.
    async fn begin_part(
        &self,
        head: &PartHead,
        path: Option<&str>,
    ) -> Result<Option<FileWriter>, FileError> {
        if head.name.as_deref() != Some(FILE_FIELD) {
            return Ok(None);
        }
        if self.entries.len() >= UPLOAD_FILES_MAX {
            return Err(FileError::bad(format!(
                "more than {UPLOAD_FILES_MAX} files at once"
            )));
        }
        let named = path
            .or(head.file_name.as_deref())
            .ok_or_else(|| FileError::bad("filename not found in Content-Disposition header"))?;
        let path = resolve(named, &self.user, self.default_dir.as_deref())?;
        if self
            .entries
            .iter()
            .any(|entry| entry["path"] == path.as_str())
        {
            return Err(FileError::bad(format!(
                "you cannot upload multiple files to the same path '{path}' in one upload \
                 request, only the first specified file was uploaded"
            )));
        }
        FileWriter::open(&path, &self.user).await.map(Some)
    }
}

/// Writes a file in large pieces on worker threads.
struct FileWriter {
    path: String,
    /// Absent while a worker has it.
    sink: Option<Sink>,
    pending: Vec<u8>,
}

impl FileWriter {
    async fn open(path: &str, user: &User) -> Result<Self, FileError> {
        let (target, uid, gid) = (path.to_owned(), user.uid, user.gid);
        let sink = pool::run(move || Sink::open(&target, uid, gid))
            .await
            .map_err(|err| FileError::from_io("opening", &err))??;
        Ok(Self {
            path: path.to_owned(),
            sink: Some(sink),
            pending: Vec::new(),
        })
    }

    async fn write(&mut self, data: &[u8]) -> Result<(), FileError> {
        self.pending.extend_from_slice(data);
        if self.pending.len() < FILE_CHUNK_BYTES {
            return Ok(());
        }
        let Some(mut sink) = self.sink.take() else {
            return Err(self.failed(&lost()));
        };
        let mut pending = std::mem::take(&mut self.pending);
        let work = pool::run(move || {
            let written = sink.write(&pending);
            pending.clear();
            (sink, pending, written)
        });
        let (sink, pending, written) = work.await.map_err(|err| self.failed(&err))?;
        self.sink = Some(sink);
        self.pending = pending;
        written.map_err(|err| self.failed(&err))
    }

    async fn finish(mut self, metadata: &Arc<Metadata>) -> Result<Value, FileError> {
        let Some(mut sink) = self.sink.take() else {
            return Err(self.failed(&lost()));
        };
        let (pending, metadata) = (std::mem::take(&mut self.pending), Arc::clone(metadata));
        let path = self.path.clone();
        let work = pool::run(move || {
            if !pending.is_empty() {
                sink.write(&pending)?;
            }
            sink.finish(&metadata)?;
            Ok(metadata::read(path.as_ref()))
        });
        let kept = work
            .await
            .and_then(|done| done)
            .map_err(|err| self.failed(&err))?;
        let mut entry = json!({"name": base_name(&self.path), "type": "file", "path": self.path});
        if !kept.is_empty() {
            entry["metadata"] = kept.into_iter().collect();
        }
        Ok(entry)
    }

    fn failed(&self, err: &io::Error) -> FileError {
        FileError::from_io(&format!("error writing file '{}'", self.path), err)
    }
}

fn lost() -> io::Error {
    io::Error::other("an earlier write failed")
}
