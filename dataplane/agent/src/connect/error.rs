// SPDX-License-Identifier: Apache-2.0
//! Errors of the Connect protocol (<https://connectrpc.com/docs/protocol#error-codes>).

use std::io;

use hyper::StatusCode;

/// A Connect error code. Only the codes that the agent sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The cause is not known.
    Unknown,
    /// The request makes no sense in any state.
    InvalidArgument,
    /// The time given by the caller is over.
    DeadlineExceeded,
    /// The named thing does not exist.
    NotFound,
    /// The thing to be made exists.
    AlreadyExists,
    /// The system refuses it to root as well (read-only file system, immutable file).
    PermissionDenied,
    /// A stated limit is reached.
    ResourceExhausted,
    /// The thing is not in a state that allows the call.
    FailedPrecondition,
    /// The agent does not do this.
    Unimplemented,
    /// A fault of the agent or of the system below it.
    Internal,
    /// The sandbox is ending or not yet ready.
    Unavailable,
    /// The caller is not known.
    Unauthenticated,
}

impl Code {
    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Code::Unknown => "unknown",
            Code::InvalidArgument => "invalid_argument",
            Code::DeadlineExceeded => "deadline_exceeded",
            Code::NotFound => "not_found",
            Code::AlreadyExists => "already_exists",
            Code::PermissionDenied => "permission_denied",
            Code::ResourceExhausted => "resource_exhausted",
            Code::FailedPrecondition => "failed_precondition",
            Code::Unimplemented => "unimplemented",
            Code::Internal => "internal",
            Code::Unavailable => "unavailable",
            Code::Unauthenticated => "unauthenticated",
        }
    }

    /// The HTTP status of a unary answer with this code.
    pub fn http_status(self) -> StatusCode {
        match self {
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists => StatusCode::CONFLICT,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::Unknown | Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// What a call answers when it fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcError {
    /// The class of the failure.
    pub code: Code,
    /// What happened and, where it can be said, what to do. For people.
    pub message: String,
}

impl RpcError {
    /// An error with a message.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The caller's request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// Something named does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    /// A limit is reached.
    pub fn exhausted(message: impl Into<String>) -> Self {
        Self::new(Code::ResourceExhausted, message)
    }

    /// An error of the system, classed by its `errno`.
    pub fn from_io(what: &str, err: &io::Error) -> Self {
        let code = match err.raw_os_error() {
            Some(libc::ENOENT) => Code::NotFound,
            Some(libc::EEXIST) => Code::AlreadyExists,
            Some(
                libc::ENOTDIR | libc::EISDIR | libc::ENAMETOOLONG | libc::ELOOP | libc::EINVAL,
            ) => Code::InvalidArgument,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => Code::PermissionDenied,
            Some(
                libc::ENOSPC
                | libc::EDQUOT
                | libc::EMFILE
                | libc::ENFILE
                | libc::EAGAIN
                | libc::ENOMEM,
            ) => Code::ResourceExhausted,
            _ => Code::Internal,
        };
        Self::new(code, format!("{what}: {err}"))
    }

    /// The JSON object `{"code","message"}`.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({"code": self.code.name(), "message": self.message})
    }
}
