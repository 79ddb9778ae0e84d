// SPDX-License-Identifier: Apache-2.0
//! Contents of files over plain HTTP.

pub mod compose;
mod content_type;
pub mod download;
mod encoding;
mod multipart;
mod range;
mod sink;
pub mod upload;

use std::io;
use std::sync::Arc;

use hyper::StatusCode;
use hyper::header::HeaderMap;

use crate::agent::{Agent, now_ms};
use crate::auth::{ACCESS_HEADER, FileClaim, basic_user, check_file_access};
use crate::connect::{Code, RpcError};
use crate::http::body::{Reply, error};
use crate::http::query::Query;
use crate::users::{User, unknown};

/// A failure of a file route.
#[derive(Debug)]
pub struct FileError {
    status: StatusCode,
    message: String,
}

impl FileError {
    /// With a status and a message for a person.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    /// The caller's mistake.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// An error of the system; a full disk or an exhausted quota is 507.
    pub fn from_io(what: &str, err: &io::Error) -> Self {
        let status = match err.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                let message = "not enough disk space available";
                return Self::new(StatusCode::INSUFFICIENT_STORAGE, message);
            }
            Some(libc::ENOENT) => StatusCode::NOT_FOUND,
            Some(
                libc::EISDIR | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP | libc::ETXTBSY,
            ) => StatusCode::BAD_REQUEST,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{what}: {err}"))
    }

    /// The answer.
    pub fn reply(&self) -> Reply {
        error(self.status, &self.message)
    }
}

impl From<RpcError> for FileError {
    fn from(err: RpcError) -> Self {
        let status = match err.code {
            Code::InvalidArgument => StatusCode::BAD_REQUEST,
            code => code.http_status(),
        };
        Self::new(status, err.message)
    }
}

/// Decides whether the caller may use a file address.
fn authorize(
    agent: &Agent,
    headers: &HeaderMap,
    query: &Query,
    operation: &str,
) -> Result<(), FileError> {
    let claim = FileClaim {
        path: query.get("path").unwrap_or_default(),
        operation,
        user: query.get("username").unwrap_or_default(),
        signature: query.get("signature"),
        expiration: query.get("signature_expiration"),
    };
    let now_s = i64::try_from(now_ms() / 1000).unwrap_or(i64::MAX);
    let token = agent.settings().access_token.clone();
    check_file_access(token.as_ref(), headers, &claim, now_s)
        .map_err(|message| FileError::new(StatusCode::UNAUTHORIZED, message))
}

/// The user of a file call: `username`, else the caller's name if it has the token, else the
/// default. Blocks.
fn file_user(
    agent: &Arc<Agent>,
    headers: &HeaderMap,
    name: Option<&str>,
) -> Result<User, FileError> {
    let given = name.filter(|name| !name.is_empty()).map(str::to_owned);
    let settings = agent.settings();
    // A signature names its user; who holds it may not choose another.
    let signed = settings.access_token.is_some() && !headers.contains_key(ACCESS_HEADER);
    let name = given.or_else(|| basic_user(headers).filter(|_| !signed));
    let name = name.or_else(|| settings.default_user.clone());
    let name = name.ok_or_else(|| FileError::bad("no user specified"))?;
    agent.users.snapshot().user(&name).ok_or_else(|| {
        let message = format!("error looking up user {}", unknown(&name));
        FileError::new(StatusCode::UNAUTHORIZED, message)
    })
}
