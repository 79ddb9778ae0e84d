// SPDX-License-Identifier: Apache-2.0
//! A layer of an image whose data lies on a slow or remote store, as a local read-only file.
//!
//! The file is served over FUSE. What is read of it is fetched in chunks, checked against sums that
//! were made when the layer was published, and kept in a sparse file; see `docs/images.md`.

pub mod cache;
pub mod config;
pub mod fetch;
pub mod index;
pub mod mount;
pub mod source;
pub mod status;
pub mod trace;

use std::fmt;
use std::io;

/// Why something failed, in words for people.
#[derive(Debug, Clone)]
pub struct Error(String);

impl Error {
    /// With this text.
    pub fn new(text: impl Into<String>) -> Self {
        Error(text.into())
    }

    /// An I/O error while doing `what`.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        Error(format!("{what}: {error}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

/// The crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// A lock whose data stays valid when a holder panicked: every change of it is one step.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
