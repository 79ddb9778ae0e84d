// SPDX-License-Identifier: Apache-2.0
//! The names of a machine: host name, machine id, boot id.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Largest file of names that is read and rewritten.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// What `/etc/hosts` says in a fresh sandbox.
pub fn hosts_of(name: &str) -> String {
    format!("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n")
}

/// Writes a new host name into `hostname` and in place of the old one into `hosts`. The user's own
/// lines stay. Nothing is written if the name is the same as before.
///
/// Errors: what the disk says.
pub fn rename_host(etc: &Path, name: &str) -> io::Result<()> {
    let hostname = etc.join("hostname");
    let before = match read_plain(&hostname) {
        Ok(text) => text.trim().to_owned(),
        Err(err) if err.kind() == ErrorKind::NotFound => String::new(),
        Err(err) => return Err(err),
    };
    if before == name {
        return Ok(());
    }
    let hosts = etc.join("hosts");
    if let (false, Ok(text)) = (before.is_empty(), read_plain(&hosts)) {
        let renamed = replace_host(&text, &before, name);
        if renamed != text {
            replace_file(&hosts, &renamed)?;
        }
    } else if !hosts.exists() {
        replace_file(&hosts, &hosts_of(name))?;
    }
    replace_file(&hostname, &format!("{name}\n"))
}

/// The text of a small plain file. The sandbox may have put anything in its place: a FIFO that would
/// block for ever, a device without an end.
fn read_plain(path: &Path) -> io::Result<String> {
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > FILE_BYTES_MAX {
        return Err(io::Error::other("not a small plain file"));
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// The text of `hosts(5)` with one name in place of another; white space stays as it is.
fn replace_host(text: &str, before: &str, name: &str) -> String {
    let mut out = String::with_capacity(text.len() + name.len());
    for line in text.split_inclusive('\n') {
        let (entry, comment) = line.split_at(line.find('#').unwrap_or(line.len()));
        for word in entry.split_inclusive(char::is_whitespace) {
            let bare = word.trim_end();
            out.push_str(if bare == before { name } else { bare });
            out.push_str(&word[bare.len()..]);
        }
        out.push_str(comment);
    }
    out
}

/// Writes the id of the machine where the system keeps one. A system without one gets none.
///
/// Errors: what the disk says.
pub fn set_machine_id(root: &Path, id: &str) -> io::Result<()> {
    for name in ["etc/machine-id", "var/lib/dbus/machine-id"] {
        let path = root.join(name);
        // The second is often a link to the first.
        if path.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            replace_file(&path, &format!("{id}\n"))?;
        }
    }
    Ok(())
}

/// Puts a file in the place of another, whole.
fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let mode = fs::metadata(path).map_or(0o644, |meta| meta.permissions().mode() & 0o7777);
    let mut half = path.as_os_str().to_owned();
    half.push(".opendsec-new");
    let half = Path::new(&half);
    let _ = fs::remove_file(half);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(half)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(Permissions::from_mode(mode))?;
    fs::rename(half, path)
}

/// The kernel's boot id, as programs see it. The kernel has no way to change it, so another file
/// lies over it.
pub struct BootId {
    /// A directory that programs do not see.
    hidden: OwnedFd,
    covered: Mutex<bool>,
}

impl BootId {
    /// Nothing lies over it yet.
    pub fn new(hidden: OwnedFd) -> Self {
        Self {
            hidden,
            covered: Mutex::new(false),
        }
    }

    /// Shows `id` from now on.
    ///
    /// Errors: what the kernel says.
    pub fn set(&self, id: &str) -> io::Result<()> {
        let mut covered = self.covered.lock().unwrap_or_else(PoisonError::into_inner);
        let hidden = self.hidden.as_fd();
        write_at(hidden, "boot_id", &format!("{id}\n"))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(hidden, "boot_id", flags)?;
        if *covered {
            // If the sandbox has taken it away itself, there is nothing left to do.
            let _ = unmount(BOOT_ID, UnmountFlags::DETACH);
            *covered = false;
        }
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&tree, "", rustix::fs::CWD, BOOT_ID, flags)?;
        *covered = true;
        Ok(())
    }
}

/// Writes a new file in place of an old one, which may still be mounted somewhere.
fn write_at(dir: BorrowedFd<'_>, name: &str, text: &str) -> io::Result<()> {
    let _ = rustix::fs::unlinkat(dir, name, rustix::fs::AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o444))?;
    fs::File::from(file).write_all(text.as_bytes())
}

/// Whether a text is a machine id: 32 hexadecimal digits.
pub fn is_machine_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a text is a UUID as the kernel writes it.
pub fn is_boot_id(text: &str) -> bool {
    let parts: Vec<usize> = text.split('-').map(str::len).collect();
    parts == [8, 4, 4, 4, 12]
        && text
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_no_plain_file_is_left_alone_and_never_waited_for() {
        let dir = crate::testing::TempDir::new();
        let hostname = dir.path().join("hostname");
        rustix::fs::mkfifoat(rustix::fs::CWD, &hostname, Mode::RUSR | Mode::WUSR).unwrap();
        assert!(rename_host(dir.path(), "new").is_err());
        assert!(!fs::symlink_metadata(&hostname).unwrap().is_file());
    }

    #[test]
    fn a_host_is_renamed_and_the_rest_stays() {
        let dir = crate::testing::TempDir::new();
        let etc = dir.path();
        let read = |name: &str| fs::read_to_string(etc.join(name)).unwrap();
        rename_host(etc, "one").unwrap();
        assert_eq!(read("hostname"), "one\n");
        assert_eq!(read("hosts"), hosts_of("one"));
        let own = "127.0.1.1\tone  one.local # one\n10.0.0.1 one-more\n";
        fs::write(etc.join("hosts"), own).unwrap();
        rename_host(etc, "one").unwrap();
        assert_eq!(read("hosts"), own);
        rename_host(etc, "two").unwrap();
        assert_eq!(read("hostname"), "two\n");
        assert_eq!(
            read("hosts"),
            "127.0.1.1\ttwo  one.local # one\n10.0.0.1 one-more\n"
        );
        fs::remove_file(etc.join("hosts")).unwrap();
        fs::write(etc.join("secret"), "s").unwrap();
        symlink("secret", etc.join("hosts")).unwrap();
        rename_host(etc, "three").unwrap();
        assert_eq!(read("secret"), "s");
    }

    #[test]
    fn machine_ids() {
        let dir = crate::testing::TempDir::new();
        let id = "0123456789abcdef0123456789abcdef";
        assert!(is_machine_id(id) && !is_machine_id("x") && !is_machine_id(&id[1..]));
        set_machine_id(dir.path(), id).unwrap();
        assert!(!dir.path().join("etc/machine-id").exists());
        fs::create_dir_all(dir.path().join("etc")).unwrap();
        fs::write(dir.path().join("etc/machine-id"), "").unwrap();
        set_machine_id(dir.path(), id).unwrap();
        let text = fs::read_to_string(dir.path().join("etc/machine-id")).unwrap();
        assert_eq!(text, format!("{id}\n"));
    }

    #[test]
    fn boot_ids() {
        assert!(is_boot_id("6dbcc4e0-5a52-4b2e-9f0a-6a0d4a3c1f11"));
        assert!(!is_boot_id("6dbcc4e05a524b2e9f0a6a0d4a3c1f11"));
        assert!(!is_boot_id("6dbcc4e0-5a52-4b2e-9f0a-6a0d4a3c1f1g"));
    }
}
