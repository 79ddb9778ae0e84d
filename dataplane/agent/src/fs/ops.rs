// SPDX-License-Identifier: Apache-2.0
//! Making, moving, removing. All of this blocks on the disk.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::json;

use super::copy;
use super::entry::describe;
use crate::connect::{Code, RpcError};
use crate::paths::{self, clean};
use crate::users::{Snapshot, User};

/// The answer `{"entry": …}` about a path.
///
/// Errors: `not_found`, or what the disk says.
pub fn stat(path: &str, users: &Snapshot) -> Result<String, RpcError> {
    let entry = describe(Path::new(path), path, users).map_err(|err| {
        // A file where a directory should be means the same as nothing there.
        if err.kind() == io::ErrorKind::NotADirectory {
            return RpcError::not_found(format!("path '{path}' does not exist"));
        }
        RpcError::from_io(&format!("path '{path}'"), &err)
    })?;
    Ok(json!({"entry": entry}).to_string())
}

/// Makes a directory with its parents.
///
/// Errors: `already_exists`; `invalid_argument` if a file is in the way.
pub fn make_dir(path: &str, user: &User, users: &Snapshot) -> Result<String, RpcError> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => {
            let message = format!("directory already exists: {path}");
            return Err(RpcError::new(Code::AlreadyExists, message));
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {path}");
            return Err(RpcError::invalid(message));
        }
        Err(err) if err.kind() == io::ErrorKind::NotFound => {}
        Err(err) => return Err(RpcError::from_io(&format!("path '{path}'"), &err)),
    }
    paths::ensure_dirs(path, user.uid, user.gid)
        .map_err(|err| RpcError::from_io(&format!("cannot make directory '{path}'"), &err))?;
    stat(path, users)
}

/// Moves a file or directory; parents of the new place are made, a file there is replaced.
///
/// Errors: `not_found` if the source is missing, else what the disk says.
pub fn rename(
    source: &str,
    destination: &str,
    user: &User,
    users: &Snapshot,
) -> Result<String, RpcError> {
    let what = format!("cannot move '{source}' to '{destination}'");
    let failed = |err: io::Error| RpcError::from_io(&what, &err);
    fs::symlink_metadata(source).map_err(failed)?;
    paths::ensure_dirs(&paths::parent(destination), user.uid, user.gid).map_err(failed)?;
    match fs::rename(source, destination) {
        Err(err) if err.kind() == io::ErrorKind::CrossesDevices => {
            copy::move_by_copy(Path::new(source), Path::new(destination)).map_err(failed)?;
        }
        other => other.map_err(failed)?,
    }
    stat(destination, users)
}

/// Removes a file or a directory with all below it. Nothing there is no error.
///
/// Errors: `invalid_argument` for the root, else what the disk says.
pub fn remove(path: &str) -> Result<String, RpcError> {
    if clean(path) == "/" {
        return Err(RpcError::invalid("the root directory cannot be removed"));
    }
    copy::remove(Path::new(path.trim_end_matches('/')))
        .map_err(|err| RpcError::from_io(&format!("cannot remove '{path}'"), &err))?;
    Ok("{}".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> User {
        User {
            name: "own".into(),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            home: "/".into(),
            shell: String::new(),
            groups: Vec::new(),
        }
    }

    #[test]
    fn make_move_remove() {
        let dir = crate::testing::TempDir::new();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let users = Snapshot::default();
        assert!(
            make_dir(&at("a/b"), &own(), &users)
                .unwrap()
                .contains("FILE_TYPE_DIRECTORY")
        );
        let code = |result: Result<String, RpcError>| result.unwrap_err().code;
        assert_eq!(
            code(make_dir(&at("a/b"), &own(), &users)),
            Code::AlreadyExists
        );
        fs::write(at("f"), "x").unwrap();
        assert_eq!(
            code(make_dir(&at("f"), &own(), &users)),
            Code::InvalidArgument
        );
        assert_eq!(
            code(make_dir(&at("f/g"), &own(), &users)),
            Code::InvalidArgument
        );
        rename(&at("f"), &at("new/place/f"), &own(), &users).unwrap();
        assert_eq!(fs::read_to_string(at("new/place/f")).unwrap(), "x");
        assert_eq!(
            code(rename(&at("f"), &at("z"), &own(), &users)),
            Code::NotFound
        );
        assert!(!dir.path().join("z").exists());
        remove(&at("new")).unwrap();
        remove(&at("new")).unwrap();
        assert_eq!(code(remove("/tmp/..")), Code::InvalidArgument);
        assert_eq!(code(stat(&at("new"), &users)), Code::NotFound);
    }
}
