// SPDX-License-Identifier: Apache-2.0
//! Paths of API calls: `~` and relative paths mean the user's home, empty means the default
//! working directory.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use crate::connect::RpcError;
use crate::limits::PATH_BYTES_MAX;
use crate::users::User;

/// Mode of directories that are made on the way to a file.
const DIR_MODE: u32 = 0o755;

/// Turns a path of a call into an absolute one. An absolute path is left as it is, so that the
/// caller sees the name it gave; a relative one is cleaned.
///
/// Errors: `invalid_argument` for NUL bytes, over-long paths and `~name`.
pub fn resolve(path: &str, user: &User, default_dir: Option<&str>) -> Result<String, RpcError> {
    let path = if path.is_empty() {
        default_dir.unwrap_or_default()
    } else {
        path
    };
    if path.contains('\0') {
        return Err(RpcError::invalid("path holds a NUL byte"));
    }
    let resolved = if path.starts_with('/') {
        path.to_owned()
    } else if let Some(rest) = path.strip_prefix('~') {
        if !rest.is_empty() && !rest.starts_with('/') {
            return Err(RpcError::invalid(format!(
                "cannot expand '{path}': only '~' and '~/…' of the calling user are known"
            )));
        }
        clean(&format!("{}/{rest}", user.home))
    } else {
        clean(&format!("{}/{path}", user.home))
    };
    if resolved.len() >= PATH_BYTES_MAX {
        return Err(RpcError::invalid(format!(
            "path is longer than {} bytes",
            PATH_BYTES_MAX - 1
        )));
    }
    Ok(resolved)
}

/// An absolute path without `.`, `..`, and doubled slashes. `..` at the root stays at the root.
pub fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The directory that holds `path`; the root holds itself.
pub fn parent(path: &str) -> String {
    let cleaned = clean(path);
    match cleaned.rfind('/') {
        None | Some(0) => "/".to_owned(),
        Some(at) => cleaned[..at].to_owned(),
    }
}

/// The last component of `path`, `/` for the root.
pub fn base_name(path: &str) -> &str {
    let trimmed = path.trim_end_matches('/');
    match trimmed.rsplit('/').next() {
        Some(name) if !name.is_empty() => name,
        _ => "/",
    }
}

/// Makes a directory with all its parents; each one made belongs to the user.
///
/// Errors: `ENOTDIR` if a part of the path is no directory, else what `mkdir` says.
pub fn ensure_dirs(path: &str, uid: u32, gid: u32) -> io::Result<()> {
    let cleaned = clean(path);
    if std::fs::metadata(&cleaned).is_ok_and(|meta| meta.is_dir()) {
        return Ok(());
    }
    let mut at = 1;
    while at <= cleaned.len() {
        let end = cleaned[at..]
            .find('/')
            .map_or(cleaned.len(), |next| at + next);
        ensure_dir(Path::new(&cleaned[..end]), uid, gid)?;
        at = end + 1;
    }
    Ok(())
}

fn ensure_dir(dir: &Path, uid: u32, gid: u32) -> io::Result<()> {
    match std::fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => return Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        Err(err) if err.kind() == io::ErrorKind::NotFound => {}
        Err(err) => return Err(err),
    }
    match std::fs::DirBuilder::new().mode(DIR_MODE).create(dir) {
        Ok(()) => {}
        // Another call made it just now; it may not have handed it over to the user yet.
        Err(err) if err.kind() == io::ErrorKind::AlreadyExists => {}
        Err(err) => return Err(err),
    }
    std::os::unix::fs::chown(dir, Some(uid), Some(gid))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn user() -> User {
        User {
            name: "user".into(),
            uid: 1000,
            gid: 1000,
            home: "/home/user".into(),
            shell: "/bin/sh".into(),
            groups: vec![1000],
        }
    }

    #[test]
    fn expands_as_the_protocol_says() {
        let user = user();
        let at = |path: &str| resolve(path, &user, Some("/work")).unwrap();
        assert_eq!(at(""), "/work");
        assert_eq!(at("a/../b.txt"), "/home/user/b.txt");
        assert_eq!(at("~"), "/home/user");
        assert_eq!(at("~/x"), "/home/user/x");
        assert_eq!(at("/tmp/../x"), "/tmp/../x");
        assert_eq!(resolve("", &user, None).unwrap(), "/home/user");
        assert!(resolve("~root/x", &user, None).is_err());
        assert!(resolve("a\0b", &user, None).is_err());
        assert!(resolve(&"x".repeat(5000), &user, None).is_err());
    }

    #[test]
    fn names_and_parents() {
        assert_eq!(base_name("/a/b/"), "b");
        assert_eq!(base_name("/"), "/");
        assert_eq!(parent("/a"), "/");
        assert_eq!(parent("/a/b/c"), "/a/b");
        assert_eq!(parent("/a/b/../c"), "/a");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn a_relative_path_is_absolute_and_clean(path in "[a-z./~]{0,40}") {
            if let Ok(resolved) = resolve(&path, &user(), None) {
                prop_assert!(resolved.starts_with('/'));
                if !path.starts_with('/') {
                    prop_assert!(!resolved.contains("//"));
                    prop_assert!(resolved.split('/').all(|part| part != ".." && part != "."));
                }
            }
        }

        #[test]
        fn cleaning_twice_changes_nothing(path in "[a-z./]{0,60}") {
            let once = clean(&path);
            prop_assert_eq!(clean(&once), once);
        }
    }
}
