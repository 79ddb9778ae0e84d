// SPDX-License-Identifier: Apache-2.0
//! Directory listings: depth first, names in byte order, symlinks not followed.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use crate::connect::{Code, RpcError};
use crate::limits::LIST_ENTRIES_MAX;
use crate::users::Snapshot;

use super::entry::describe;

/// Lists what is below `path`, `depth` levels deep, as the JSON of `ListDirResponse`.
/// Blocks on the disk.
///
/// Errors: `not_found`; `invalid_argument` if it is no directory; `failed_precondition` for a
/// circle of symlinks; `resource_exhausted` for more entries than the limit.
pub fn list(path: &str, depth: usize, users: &Snapshot) -> Result<String, RpcError> {
    let real = fs::canonicalize(path).map_err(|err| match err.raw_os_error() {
        Some(libc::ELOOP) => RpcError::new(
            Code::FailedPrecondition,
            format!("circle of symlinks at '{path}'"),
        ),
        _ => RpcError::from_io(&format!("path '{path}'"), &err),
    })?;
    let meta = fs::metadata(&real).map_err(|err| RpcError::from_io(path, &err))?;
    if !meta.is_dir() {
        return Err(RpcError::invalid(format!(
            "path is not a directory: {path}"
        )));
    }
    let mut listing = Listing {
        json: String::from(r#"{"entries":["#),
        count: 0,
        users,
    };
    listing.walk(&real, path.trim_end_matches('/'), depth)?;
    listing.json.push_str("]}");
    Ok(listing.json)
}

/// The answer is written as it is found: a large directory is held in memory once, not twice.
struct Listing<'a> {
    json: String,
    count: usize,
    users: &'a Snapshot,
}

impl Listing<'_> {
    fn walk(&mut self, dir: &Path, shown: &str, depth: usize) -> Result<(), RpcError> {
        let names = sorted_names(dir)
            .map_err(|err| RpcError::from_io(&format!("cannot read directory '{shown}'"), &err))?;
        for name in names {
            let path = dir.join(&name);
            let shown = format!("{shown}/{}", name.to_string_lossy());
            let entry = match describe(&path, &shown, self.users) {
                Ok(entry) => entry,
                // It went away since the directory was read.
                Err(err) if err.kind() == io::ErrorKind::NotFound => continue,
                Err(err) => return Err(RpcError::from_io(&shown, &err)),
            };
            self.count += 1;
            if self.count > LIST_ENTRIES_MAX {
                return Err(RpcError::exhausted(format!(
                    "more than {LIST_ENTRIES_MAX} entries: list a part, or run 'find'"
                )));
            }
            if self.count > 1 {
                self.json.push(',');
            }
            let is_link = entry.get("isSymlink").is_some();
            let is_dir = entry["type"] == "FILE_TYPE_DIRECTORY" && !is_link;
            self.json.push_str(&entry.to_string());
            if is_dir && depth > 1 {
                self.descend(&path, &shown, depth - 1)?;
            }
        }
        Ok(())
    }

    fn descend(&mut self, dir: &Path, shown: &str, depth: usize) -> Result<(), RpcError> {
        match self.walk(dir, shown, depth) {
            Err(err) if err.code == Code::NotFound => Ok(()),
            other => other,
        }
    }
}

fn sorted_names(dir: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.push(entry?.file_name());
        if names.len() > LIST_ENTRIES_MAX {
            break;
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn paths(dir: &Path, depth: usize) -> Vec<String> {
        let root = dir.to_str().unwrap();
        let json: serde_json::Value =
            serde_json::from_str(&list(root, depth, &Snapshot::default()).unwrap()).unwrap();
        let entries = json["entries"].as_array().unwrap().iter();
        entries
            .map(|e| e["path"].as_str().unwrap()[root.len()..].to_owned())
            .collect()
    }

    #[test]
    fn order_and_depth() {
        let dir = crate::testing::TempDir::new();
        for sub in ["b/deep/er", "a"] {
            fs::create_dir_all(dir.path().join(sub)).unwrap();
        }
        fs::write(dir.path().join("b.txt"), "").unwrap();
        fs::write(dir.path().join("b/z"), "").unwrap();
        symlink("b", dir.path().join("link")).unwrap();
        assert_eq!(paths(dir.path(), 1), ["/a", "/b", "/b.txt", "/link"]);
        assert_eq!(
            paths(dir.path(), 2),
            ["/a", "/b", "/b/deep", "/b/z", "/b.txt", "/link"]
        );
        assert_eq!(paths(dir.path(), 9).len(), 7);
        assert_eq!(paths(&dir.path().join("link"), 1), ["/deep", "/z"]);
    }

    #[test]
    fn what_is_no_directory() {
        let dir = crate::testing::TempDir::new();
        let code = |name: &str| {
            let path = dir.path().join(name);
            list(path.to_str().unwrap(), 1, &Snapshot::default())
                .unwrap_err()
                .code
        };
        fs::write(dir.path().join("f"), "").unwrap();
        symlink("circle", dir.path().join("circle")).unwrap();
        assert_eq!(code("none"), Code::NotFound);
        assert_eq!(code("f"), Code::InvalidArgument);
        assert_eq!(code("circle"), Code::FailedPrecondition);
    }
}
