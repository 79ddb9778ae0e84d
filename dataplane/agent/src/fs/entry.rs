// SPDX-License-Identifier: Apache-2.0
//! The facts of one file system entry, as `EntryInfo` of the protocol.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde_json::{Map, Value};

use super::metadata;
use crate::connect::json::timestamp;
use crate::paths::base_name;
use crate::users::Snapshot;

const TYPE_FILE: &str = "FILE_TYPE_FILE";
const TYPE_DIRECTORY: &str = "FILE_TYPE_DIRECTORY";

/// Reads the entry at `path` and describes it under the name `shown`. Blocks on the disk.
///
/// Errors: those of lstat(2).
pub fn describe(path: &Path, shown: &str, users: &Snapshot) -> io::Result<Value> {
    let meta = fs::symlink_metadata(path)?;
    let link = meta.is_symlink();
    // A link's type and mode are those of what it leads to, its size and owner its own.
    let target = if link { fs::metadata(path).ok() } else { None };
    let facts = if link { target.as_ref() } else { Some(&meta) };
    let mut entry = Map::new();
    entry.insert("name".into(), base_name(shown).into());
    entry.insert("path".into(), shown.into());
    if let Some(kind) = facts.and_then(kind) {
        entry.insert("type".into(), kind.into());
    }
    if meta.size() != 0 {
        entry.insert("size".into(), meta.size().to_string().into());
    }
    match facts.map(|facts| facts.mode() & 0o777) {
        None | Some(0) => {}
        Some(mode) => {
            entry.insert("mode".into(), mode.into());
        }
    }
    entry.insert("permissions".into(), permissions(&meta).into());
    entry.insert("owner".into(), users.user_name(meta.uid()).into());
    entry.insert("group".into(), users.group_name(meta.gid()).into());
    let nanos = u32::try_from(meta.mtime_nsec()).unwrap_or(0);
    entry.insert("modifiedTime".into(), timestamp(meta.mtime(), nanos).into());
    if link {
        let end = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        entry.insert("symlinkTarget".into(), end.to_string_lossy().into());
        entry.insert("isSymlink".into(), true.into());
    }
    let metadata = metadata::read(path);
    if !metadata.is_empty() {
        entry.insert("metadata".into(), metadata.into_iter().collect());
    }
    Ok(Value::Object(entry))
}

/// The protocol knows files and directories; all else has no type.
fn kind(meta: &Metadata) -> Option<&'static str> {
    if meta.is_file() {
        Some(TYPE_FILE)
    } else if meta.is_dir() {
        Some(TYPE_DIRECTORY)
    } else {
        None
    }
}

/// Mode as the protocol's clients know it: a letter for each special quality or `-` for none, then
/// the nine of `ls`. So a symlink is `Lrwxrwxrwx` and `/tmp` is `dtrwxrwxrwx`.
fn permissions(meta: &Metadata) -> String {
    let kind = meta.file_type();
    let mode = meta.mode();
    let qualities = [
        (kind.is_dir(), "d"),
        (kind.is_symlink(), "L"),
        (kind.is_block_device() || kind.is_char_device(), "D"),
        (kind.is_fifo(), "p"),
        (kind.is_socket(), "S"),
        (mode & libc::S_ISUID != 0, "u"),
        (mode & libc::S_ISGID != 0, "g"),
        (kind.is_char_device(), "c"),
        (mode & libc::S_ISVTX != 0, "t"),
    ];
    let mut text: String = qualities
        .iter()
        .filter(|(is, _)| *is)
        .map(|(_, letter)| *letter)
        .collect();
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) != 0 {
            letter
        } else {
            '-'
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn look(path: &Path) -> Value {
        describe(path, &path.to_string_lossy(), &Snapshot::default()).unwrap()
    }

    #[test]
    fn files_directories_and_links() {
        let dir = crate::testing::TempDir::new();
        let file = dir.path().join("f");
        fs::write(&file, "12345").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let entry = look(&file);
        assert_eq!(entry["name"], "f");
        assert_eq!(entry["type"], TYPE_FILE);
        assert_eq!(entry["size"], "5");
        assert_eq!(entry["mode"], 0o640);
        assert_eq!(entry["permissions"], "-rw-r-----");
        assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'));
        assert!(entry.get("symlinkTarget").is_none());

        let link = dir.path().join("l");
        symlink("f", &link).unwrap();
        let entry = look(&link);
        assert_eq!(entry["type"], TYPE_FILE);
        assert_eq!(entry["permissions"], "Lrwxrwxrwx");
        assert_eq!(
            entry["symlinkTarget"],
            fs::canonicalize(&file).unwrap().to_str().unwrap()
        );
        assert_eq!(entry["isSymlink"], true);

        let broken = dir.path().join("b");
        symlink("nowhere", &broken).unwrap();
        let entry = look(&broken);
        assert!(entry.get("type").is_none());
        assert_eq!(entry["symlinkTarget"], broken.to_str().unwrap());

        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let entry = look(dir.path());
        assert_eq!(entry["type"], TYPE_DIRECTORY);
        assert_eq!(entry["permissions"], "dtrwxrwxrwx");
        assert!(describe(&dir.path().join("none"), "x", &Snapshot::default()).is_err());
    }
}
