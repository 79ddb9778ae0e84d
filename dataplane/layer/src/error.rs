// SPDX-License-Identifier: Apache-2.0
//! What can go wrong, by who has to act.

use std::io;

use rustix::io::Errno;

/// As much of a path as an error shows.
const ENTRY_BYTES_MAX: usize = 300;

/// An error, or what was wanted.
pub type Result<T> = std::result::Result<T, Error>;

/// The sort of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The input is damaged, or means harm, or holds what no layer can hold.
    Invalid,
    /// It is not what its digest says.
    Mismatch,
    /// It is larger than was allowed.
    Limit,
    /// The disk is full, or the quota is used up.
    NoSpace,
    /// The system failed.
    Other,
}

/// One error.
#[derive(Clone, Debug)]
pub struct Error {
    /// Its sort.
    pub kind: Kind,
    /// What is wrong, for a person to read.
    pub what: String,
    /// The path inside the layer that it concerns.
    pub entry: Option<String>,
}

impl Error {
    /// An error of the input.
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, what)
    }

    /// An error of any sort.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            entry: None,
        }
    }

    /// What the system said while something was done.
    pub fn system(what: &str, err: impl Into<io::Error>) -> Self {
        let err = err.into();
        let kind = match err.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Kind::NoSpace,
            _ => Kind::Other,
        };
        Self::new(kind, format!("{what}: {err}"))
    }

    /// What the system said about a path that the input has chosen: some errors are the input's.
    pub fn of_path(what: &str, err: Errno) -> Self {
        let kind = match err {
            Errno::LOOP
            | Errno::NOTDIR
            | Errno::NOENT
            | Errno::XDEV
            | Errno::NAMETOOLONG
            | Errno::FBIG
            | Errno::MLINK => Kind::Invalid,
            Errno::NOSPC | Errno::DQUOT => Kind::NoSpace,
            _ => Kind::Other,
        };
        Self::new(kind, format!("{what}: {}", io::Error::from(err)))
    }

    /// What reading the input gave. An error that is not the system's is one of the content.
    pub fn of_input(err: &io::Error) -> Self {
        if err.raw_os_error().is_some() {
            Self::system("cannot read the archive", clone_os(err))
        } else {
            Self::invalid(format!("the archive is damaged: {err}"))
        }
    }

    /// The same error, about this path unless it names one already.
    pub fn at(mut self, path: &[u8]) -> Self {
        if self.entry.is_none() {
            let shown = &path[..path.len().min(ENTRY_BYTES_MAX)];
            self.entry = Some(String::from_utf8_lossy(shown).into_owned());
        }
        self
    }
}

fn clone_os(err: &io::Error) -> io::Error {
    err.raw_os_error()
        .map_or_else(|| err.kind().into(), io::Error::from_raw_os_error)
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.entry {
            Some(entry) => write!(f, "{entry}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Error {}
