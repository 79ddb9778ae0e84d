// SPDX-License-Identifier: Apache-2.0
//! Memory of virtual machines, taken from outside the program that runs them.
//!
//! A VM's RAM is one private mapping in its VMM's address space: over nothing (it was booted) or over
//! a file (it was restored from it). [`save`] writes what differs into a reflinked copy of that file,
//! [`sums`] tells whether a saved file is still what was written, [`map`] puts a file under a running
//! process's RAM, [`launch`] starts a VMM without rights of its own, and [`tsc`] measures the clock
//! that emulated guests count with.
#![cfg(target_os = "linux")]

pub mod launch;
pub mod map;
pub mod process;
pub mod save;
pub mod sums;
pub mod tsc;

/// Size of a page. Saved files and their sums are made of pages of this size; a host with another
/// page size is refused.
pub const PAGE: usize = 4096;

/// An error with a sentence that says what was tried.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, for a person to read.
#[derive(Debug)]
pub struct Error {
    /// What was being done.
    pub what: String,
    /// Why it failed.
    pub cause: std::io::Error,
}

impl Error {
    /// An error that is not the system's.
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            cause: std::io::Error::from(std::io::ErrorKind::InvalidData),
        }
    }

    /// The last system call's error.
    pub fn last(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            cause: std::io::Error::last_os_error(),
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.cause.raw_os_error().is_some() {
            write!(f, "{}: {}", self.what, self.cause)
        } else {
            f.write_str(&self.what)
        }
    }
}

impl std::error::Error for Error {}

/// Adds to a system error what was being done.
pub trait Context<T> {
    /// Says what was being done.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for std::io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|cause| Error {
            what: what(),
            cause,
        })
    }
}

/// Refuses hosts whose pages are not [`PAGE`] bytes.
pub fn require_page_size() -> Result<()> {
    // SAFETY: sysconf only reads.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    if size == PAGE as libc::c_long {
        Ok(())
    } else {
        Err(Error::new(format!(
            "pages of {size} bytes are not supported"
        )))
    }
}
