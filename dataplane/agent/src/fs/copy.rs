// SPDX-License-Identifier: Apache-2.0
//! Moving between file systems by copying. Also a directory of an overlay's lower layer cannot be
//! renamed (rename(2) answers `EXDEV`), and a sandbox's whole root is such a layer.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags, lgetxattr, llistxattr,
    lsetxattr, mknodat, utimensat,
};

/// Longest list of names and longest value of extended attributes (xattr(7)).
const XATTR_BYTES_MAX: usize = 64 * 1024;
const MODE_BITS: u32 = 0o7777;

/// Copies `source` with all below it to `destination`, then removes it. A copy that fails is
/// removed, and the source is left as it was.
///
/// Errors: what the disk says.
pub fn move_by_copy(source: &Path, destination: &Path) -> io::Result<()> {
    if destination.starts_with(source) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // As rename(2): a file gives way to a file, an empty directory to a directory.
    match fs::symlink_metadata(destination) {
        Ok(meta) if meta.is_dir() => fs::remove_dir(destination)?,
        Ok(_) => fs::remove_file(destination)?,
        Err(err) if err.kind() == io::ErrorKind::NotFound => {}
        Err(err) => return Err(err),
    }
    if let Err(err) = copy(source, destination) {
        let _ = remove(destination);
        return Err(err);
    }
    remove(source)
}

/// Removes whatever is at `path`, a directory with all below it. Nothing there is no error.
///
/// Errors: what the disk says.
pub fn remove(path: &Path) -> io::Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(err) => Err(err),
    };
    match result {
        // A part of the path may also have become a file.
        Err(err)
            if matches!(
                err.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn copy(source: &Path, destination: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(source)?;
    let kind = meta.file_type();
    if kind.is_dir() {
        fs::create_dir(destination)?;
        for entry in fs::read_dir(source)? {
            let name = entry?.file_name();
            copy(&source.join(&name), &destination.join(&name))?;
        }
    } else if kind.is_symlink() {
        symlink(fs::read_link(source)?, destination)?;
    } else if kind.is_file() {
        // std copies inside the kernel where it can, by clone where it can.
        io::copy(
            &mut File::open(source)?,
            &mut File::create_new(destination)?,
        )?;
    } else {
        let node = if kind.is_fifo() {
            FileType::Fifo
        } else if kind.is_socket() {
            FileType::Socket
        } else if kind.is_block_device() {
            FileType::BlockDevice
        } else {
            FileType::CharacterDevice
        };
        mknodat(
            CWD,
            destination,
            node,
            Mode::from_raw_mode(meta.mode() & MODE_BITS),
            meta.rdev(),
        )?;
    }
    copy_facts(source, destination, &meta)
}

/// Owner, mode, attributes, times: in this order, for each step may undo a later one.
fn copy_facts(source: &Path, destination: &Path, meta: &Metadata) -> io::Result<()> {
    lchown(destination, Some(meta.uid()), Some(meta.gid()))?;
    if !meta.is_symlink() {
        fs::set_permissions(
            destination,
            fs::Permissions::from_mode(meta.mode() & MODE_BITS),
        )?;
    }
    copy_xattrs(source, destination);
    let time = |seconds, nanos| Timespec {
        tv_sec: seconds,
        tv_nsec: nanos,
    };
    let times = Timestamps {
        last_access: time(meta.atime(), meta.atime_nsec()),
        last_modification: time(meta.mtime(), meta.mtime_nsec()),
    };
    utimensat(CWD, destination, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}

/// Best effort: the new file system may not take them all.
fn copy_xattrs(source: &Path, destination: &Path) {
    let mut names = vec![0; XATTR_BYTES_MAX];
    let Ok(length) = llistxattr(source, names.as_mut_slice()) else {
        return;
    };
    for name in names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0; XATTR_BYTES_MAX];
        if let Ok(length) = lgetxattr(source, name, value.as_mut_slice()) {
            let _ = lsetxattr(destination, name, &value[..length], XattrFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_a_tree_with_its_facts() {
        let dir = crate::testing::TempDir::new();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("sub")).unwrap();
        fs::write(from.join("sub/f"), "text").unwrap();
        fs::set_permissions(from.join("sub/f"), fs::Permissions::from_mode(0o750)).unwrap();
        symlink("sub/f", from.join("link")).unwrap();
        mknodat(
            CWD,
            from.join("pipe"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let before = fs::metadata(from.join("sub/f")).unwrap();
        move_by_copy(&from, &to).unwrap();
        assert!(!from.exists());
        let after = fs::metadata(to.join("sub/f")).unwrap();
        assert_eq!(fs::read_to_string(to.join("sub/f")).unwrap(), "text");
        assert_eq!(after.mode(), before.mode());
        assert_eq!(
            (after.mtime(), after.mtime_nsec()),
            (before.mtime(), before.mtime_nsec())
        );
        assert_eq!(
            fs::read_link(to.join("link")).unwrap().to_str(),
            Some("sub/f")
        );
        assert!(
            fs::symlink_metadata(to.join("pipe"))
                .unwrap()
                .file_type()
                .is_fifo()
        );
    }

    #[test]
    fn a_directory_does_not_go_into_itself() {
        let dir = crate::testing::TempDir::new();
        assert!(move_by_copy(dir.path(), &dir.path().join("in")).is_err());
        remove(&dir.path().join("none/at/all")).unwrap();
    }
}
