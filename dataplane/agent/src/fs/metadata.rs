// SPDX-License-Identifier: Apache-2.0
//! User metadata of files, kept as extended attributes (xattr(7)) under `user.e2b.`.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use hyper::header::HeaderMap;
use rustix::fs::{
    XattrFlags, flistxattr, fremovexattr, fsetxattr, getxattr, listxattr, listxattr_query,
};
use rustix::io::Errno;

use crate::limits::{METADATA_BYTES_MAX, METADATA_KEY_BYTES_MAX};

const PREFIX: &str = "user.e2b.";
const HEADER_PREFIX: &str = "x-metadata-";
/// Kernel limits: all names, one value.
const NAMES_BYTES_MAX: usize = 64 * 1024;

/// The metadata of a file.
pub type Metadata = BTreeMap<String, String>;

/// Takes metadata out of `X-Metadata-<Key>` headers; of a repeated one the first counts.
///
/// Errors: a message for a 400 answer.
pub fn from_headers(headers: &HeaderMap) -> Result<Metadata, String> {
    let mut metadata = Metadata::new();
    let mut total = 0;
    for name in headers.keys() {
        let Some(key) = name
            .as_str()
            .strip_prefix(HEADER_PREFIX)
            .filter(|key| !key.is_empty())
        else {
            continue;
        };
        let raw = headers
            .get(name)
            .map(|value| value.as_bytes())
            .unwrap_or_default();
        if let Some(at) = raw.iter().position(|byte| !(0x20..=0x7e).contains(byte)) {
            return Err(format!(
                "value of '{key}' is not printable ASCII at byte {at}"
            ));
        }
        if key.len() > METADATA_KEY_BYTES_MAX {
            return Err(format!(
                "a key is longer than {METADATA_KEY_BYTES_MAX} bytes"
            ));
        }
        total += PREFIX.len() + key.len() + raw.len();
        metadata.insert(key.to_owned(), String::from_utf8_lossy(raw).into_owned());
    }
    if total > METADATA_BYTES_MAX {
        return Err(format!(
            "{total} bytes are over the limit of {METADATA_BYTES_MAX}"
        ));
    }
    Ok(metadata)
}

/// Makes `metadata` the whole metadata of an open file. A file system without extended attributes
/// (`/proc`, `/sys`) is no error: the answer shows what was kept.
///
/// Errors: what the system says.
pub fn replace(file: impl AsFd, metadata: &Metadata) -> io::Result<()> {
    let mut names = vec![0; NAMES_BYTES_MAX];
    let length = match flistxattr(&file, names.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(()),
        Err(err) => return Err(err.into()),
    };
    for key in own_keys(&names[..length]) {
        if !metadata.contains_key(&key) {
            match fremovexattr(&file, format!("{PREFIX}{key}").as_str()) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(err) => return Err(err.into()),
            }
        }
    }
    for (key, value) in metadata {
        let name = format!("{PREFIX}{key}");
        match fsetxattr(&file, name.as_str(), value.as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(err) => return Err(err.into()),
        }
    }
    Ok(())
}

/// The metadata of a path, symlinks followed. What cannot be read, or is no text, is left out.
pub fn read(path: &Path) -> Metadata {
    let mut metadata = Metadata::new();
    // Most files have none: ask for the size before a buffer is made.
    let size = listxattr_query(path).unwrap_or(0);
    if size == 0 {
        return metadata;
    }
    let mut names = vec![0; size];
    let Ok(length) = listxattr(path, names.as_mut_slice()) else {
        return metadata;
    };
    for key in own_keys(&names[..length]) {
        let mut value = [0; METADATA_BYTES_MAX];
        let name = format!("{PREFIX}{key}");
        if let Ok(length) = getxattr(path, name.as_str(), &mut value[..])
            && let Ok(text) = std::str::from_utf8(&value[..length])
        {
            metadata.insert(key, text.to_owned());
        }
    }
    metadata
}

fn own_keys(names: &[u8]) -> Vec<String> {
    let names = names
        .split(|byte| *byte == 0)
        .filter_map(|name| std::str::from_utf8(name).ok());
    names
        .filter_map(|name| name.strip_prefix(PREFIX))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let name: hyper::header::HeaderName = name.parse().unwrap();
            headers.append(name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn headers_become_lower_case_keys() {
        let metadata = from_headers(&headers(&[
            ("X-Metadata-Owner", "a b"),
            ("X-Metadata-Owner", "c"),
        ]));
        assert_eq!(
            metadata.unwrap(),
            Metadata::from([("owner".into(), "a b".into())])
        );
        assert!(from_headers(&headers(&[("X-Metadata-a", &"x".repeat(5000))])).is_err());
        assert!(
            from_headers(&headers(&[(
                &format!("X-Metadata-{}", "k".repeat(247)),
                "v"
            )]))
            .is_err()
        );
        let mut bad = HeaderMap::new();
        bad.insert(
            "x-metadata-a",
            hyper::header::HeaderValue::from_bytes(b"\xff").unwrap(),
        );
        assert!(from_headers(&bad).is_err());
    }

    #[test]
    fn each_write_replaces_all() {
        let dir = crate::testing::TempDir::new();
        let path = dir.path().join("f");
        let file = File::create(&path).unwrap();
        if fsetxattr(&file, "user.probe", b"", XattrFlags::empty()) == Err(Errno::OPNOTSUPP) {
            eprintln!("skipped: this file system has no user extended attributes");
            return;
        }
        let first = Metadata::from([("a".into(), "1".into()), ("b".into(), "2".into())]);
        replace(&file, &first).unwrap();
        assert_eq!(read(&path), first);
        let second = Metadata::from([("b".into(), "3".into())]);
        replace(&file, &second).unwrap();
        assert_eq!(read(&path), second);
        replace(&file, &Metadata::new()).unwrap();
        assert!(read(&path).is_empty());
    }
}
