// SPDX-License-Identifier: Apache-2.0
//! What is in a layer's folder.
//!
//! ```text
//! remote.json   where its data is, and time limits; it may hold a signed address: owner only
//! index         sums of its chunks
//! cache         the chunks that were fetched, sparse
//! chunks        one byte per chunk: 1 once it is in the cache
//! trace         chunks in the order they were first read (u32 LE each)
//! served/       where the layer is mounted, as `layer.erofs` beside `status`
//! lock          held by the process that serves it
//! ```

use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

/// `remote.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Remote {
    /// `http://…`, `https://…` or an absolute path: the layer's data.
    pub source: String,
    /// One request may take this long.
    #[serde(default = "request_s")]
    pub request_s: f64,
    /// A read waits this long for the store before it fails.
    #[serde(default = "read_s")]
    pub read_s: f64,
    /// While the store counts as lost, a read waits this long.
    #[serde(default = "lost_read_s")]
    pub lost_read_s: f64,
    /// Requests at once.
    #[serde(default = "parallel")]
    pub parallel: usize,
    /// The order of first reads is recorded for this long after the first one.
    #[serde(default = "trace_s")]
    pub trace_s: f64,
}

fn request_s() -> f64 {
    15.0
}
fn read_s() -> f64 {
    30.0
}
fn lost_read_s() -> f64 {
    3.0
}
fn parallel() -> usize {
    8
}
fn trace_s() -> f64 {
    60.0
}

impl Remote {
    /// Read `remote.json` of a layer's folder.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("remote.json");
        let data = std::fs::read(&path).map_err(|e| Error::io(path.display(), &e))?;
        let remote: Remote = serde_json::from_slice(&data)
            .map_err(|e| Error::new(format!("{}: {e}", path.display())))?;
        let times = [
            remote.request_s,
            remote.read_s,
            remote.lost_read_s,
            remote.trace_s,
        ];
        if times.iter().any(|t| !(0.0..=3600.0).contains(t)) || !(1..=64).contains(&remote.parallel)
        {
            return Err(Error::new(format!("{}: impossible limits", path.display())));
        }
        Ok(remote)
    }
}
