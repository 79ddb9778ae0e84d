// SPDX-License-Identifier: Apache-2.0
//! Paths that are left out.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::error::{Error, Kind, Result};

/// Patterns of paths below the directory: `*` and `?` within one name, `**` across names. What is
/// below a path that matches is left out with it.
pub struct Exclude {
    set: GlobSet,
}

impl Exclude {
    /// Of patterns such as `/root/.bash_history` and `**/__pycache__`; a leading slash means nothing.
    ///
    /// Errors: `Other` for what is no pattern.
    pub fn new(patterns: &[String]) -> Result<Self> {
        let mut builder = GlobSetBuilder::new();
        for pattern in patterns {
            let glob = GlobBuilder::new(pattern.trim_matches('/'))
                .literal_separator(true)
                .backslash_escape(true)
                .build()
                .map_err(|err| Error::new(Kind::Other, format!("no pattern: {err}")))?;
            builder.add(glob);
        }
        let set = builder
            .build()
            .map_err(|err| Error::new(Kind::Other, format!("no patterns: {err}")))?;
        Ok(Self { set })
    }

    /// Whether a path matches by itself. Whoever walks does not go below one that does.
    pub fn hits(&self, path: &[u8]) -> bool {
        !self.set.is_empty() && self.set.is_match(Path::new(OsStr::from_bytes(path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        let patterns = [
            "/root/.bash_history",
            "**/__pycache__",
            "tmp/*.log",
            "/run/",
        ];
        let exclude = Exclude::new(&patterns.map(str::to_owned)).unwrap();
        for hit in [
            "root/.bash_history",
            "a/b/__pycache__",
            "__pycache__",
            "tmp/x.log",
            "run",
        ] {
            assert!(exclude.hits(hit.as_bytes()), "{hit}");
        }
        for miss in ["home/.bash_history", "tmp/a/x.log", "running", "a/run"] {
            assert!(!exclude.hits(miss.as_bytes()), "{miss}");
        }
        assert!(exclude.hits(b"tmp/\xff.log"));
        assert!(Exclude::new(&["a[".to_owned()]).is_err());
        assert!(!Exclude::new(&[]).unwrap().hits(b""));
    }
}
