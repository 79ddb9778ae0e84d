// SPDX-License-Identifier: Apache-2.0
//! The root file system of a virtual machine: read-only EROFS layers and one ext4 disk, joined by
//! overlayfs, as a container sandbox has it; and the move into it.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount, mount_move};

use super::disks::Disks;
use super::{identity, modules};
use crate::setup::make_tmp;

const DISK_DIR: &str = "/disk";
const NEW_ROOT: &str = "/newroot";
/// The name of a machine that nobody has named yet.
pub const HOSTNAME_DEFAULT: &str = "opendsec";
/// At least, and at most a half of the memory.
const SHM_BYTES_MIN: u64 = 64 * 1024 * 1024;
const RUN_BYTES: u64 = 64 * 1024 * 1024;

/// Mounts what programs, also this one, expect to find.
///
/// Errors: the place and what the kernel says.
pub fn mount_kernel_files() -> Result<(), String> {
    let safe = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    attach("proc", "/proc", "proc", safe, "")?;
    attach("sysfs", "/sys", "sysfs", safe, "")?;
    attach(
        "devtmpfs",
        "/dev",
        "devtmpfs",
        MountFlags::NOSUID,
        "mode=0755",
    )
}

fn attach(
    source: &str,
    target: &str,
    kind: &str,
    flags: MountFlags,
    data: &str,
) -> Result<(), String> {
    let data = std::ffi::CString::new(data).map_err(|err| err.to_string())?;
    let what = |err: io::Error| format!("mount of {kind} at {target}: {err}");
    make_dir(Path::new(target), 0o755).map_err(what)?;
    match mount(source, target, kind, flags, data.as_c_str()) {
        // The kernel mounts /dev by itself if it was built so.
        Err(rustix::io::Errno::BUSY) => Ok(()),
        other => other.map_err(|err| what(err.into())),
    }
}

/// Joins the disks to the new root.
///
/// Args: `layers`: how many there are; `resolvers`: name servers for a fresh disk.
///
/// Errors: the place and what the kernel says.
pub fn assemble(disks: &Disks, layers: usize, resolvers: &[&str]) -> Result<OwnedFd, String> {
    let mut lower = String::new();
    for index in 0..layers {
        let device = device(disks, &format!("layer{index}"))?;
        let target = format!("/layers/{index}");
        // Persistent memory is the host's page cache itself: files that are not compressed are used
        // in place, without a copy in the guest. Old kernels may not know the option.
        let in_place = device.starts_with("/dev/pmem")
            && attach(&device, &target, "erofs", MountFlags::RDONLY, "dax=always").is_ok();
        if !in_place {
            attach(&device, &target, "erofs", MountFlags::RDONLY, "")?;
        }
        let _ = write!(lower, "{}{target}", if index == 0 { "" } else { ":" });
    }
    let disk = device(disks, "disk")?;
    let flags = MountFlags::NOATIME;
    // Freed blocks go back to the node where the device can do it.
    attach(&disk, DISK_DIR, "ext4", flags, "discard")?;
    let disk = Path::new(DISK_DIR);
    prepare_writable(disk, resolvers).map_err(|err| format!("laying out the disk: {err}"))?;
    // Not `volatile`: a sandbox that is resumed from its disk alone must find what it synced.
    let options = format!("lowerdir={lower},upperdir={DISK_DIR}/upper,workdir={DISK_DIR}/work");
    attach(
        "overlay",
        NEW_ROOT,
        "overlay",
        MountFlags::empty(),
        &options,
    )?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(disk, flags, Mode::empty()).map_err(|err| format!("opening the disk: {err}"))
}

fn device(disks: &Disks, name: &str) -> Result<String, String> {
    let found = disks.get(name).ok_or_else(|| format!("no disk {name}"))?;
    Ok(found.to_string_lossy().into_owned())
}

/// Lays out a fresh disk and writes the files that name the sandbox, as the node does it for
/// containers. What is there stays: it may be the user's.
fn prepare_writable(disk: &Path, resolvers: &[&str]) -> io::Result<()> {
    let upper = disk.join("upper");
    make_dir(&disk.join("work"), 0o700)?;
    make_dir(&upper, 0o755)?;
    let etc = upper.join("etc");
    make_dir(&etc, 0o755)?;
    let mut resolv = String::new();
    for resolver in resolvers {
        let _ = writeln!(resolv, "nameserver {resolver}");
    }
    resolv.push_str("options timeout:2 attempts:3\n");
    let files = [
        ("hostname", format!("{HOSTNAME_DEFAULT}\n")),
        ("hosts", identity::hosts_of(HOSTNAME_DEFAULT)),
        ("resolv.conf", resolv),
    ];
    for (name, text) in files {
        let path = etc.join(name);
        // A file that was removed has a mark in its place, which counts as there.
        if path.symlink_metadata().is_err() {
            fs::write(&path, text)?;
            fs::set_permissions(&path, Permissions::from_mode(0o644))?;
        }
    }
    Ok(())
}

/// Makes a directory unless it is there; also those above it. The mode is that of a new one.
fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    match DirBuilder::new().recursive(true).mode(mode).create(path) {
        Err(err) if err.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Mounts into the new root what a sandbox has, moves into it, and frees the initramfs.
///
/// Errors: the place and what the kernel says.
pub fn enter(memory_bytes: u64) -> Result<(), String> {
    let under = |path: &str| format!("{NEW_ROOT}{path}");
    for path in ["/proc", "/sys", "/dev"] {
        let target = under(path);
        make_dir(Path::new(&target), 0o755)
            .and_then(|()| Ok(mount_move(path, target.as_str())?))
            .map_err(|err| format!("moving {path}: {err}"))?;
    }
    let safe = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    let no_exec = MountFlags::NOSUID | MountFlags::NOEXEC;
    let no_dev = MountFlags::NOSUID | MountFlags::NODEV;
    let shm = format!("mode=1777,size={}", SHM_BYTES_MIN.max(memory_bytes / 2));
    let run = format!("mode=755,size={RUN_BYTES}");
    let pts = "newinstance,ptmxmode=0666,mode=0620,gid=5";
    attach("devpts", &under("/dev/pts"), "devpts", no_exec, pts)?;
    attach("shm", &under("/dev/shm"), "tmpfs", no_dev, &shm)?;
    attach("mqueue", &under("/dev/mqueue"), "mqueue", safe, "")?;
    attach("tmpfs", &under("/run"), "tmpfs", no_dev, &run)?;
    attach(
        "cgroup2",
        &under("/sys/fs/cgroup"),
        "cgroup2",
        safe,
        "nsdelegate",
    )?;
    link_devices(Path::new(&under("/dev"))).map_err(|err| format!("links in /dev: {err}"))?;
    make_tmp(Path::new(&under("/tmp"))).map_err(|err| format!("/tmp: {err}"))?;
    // Memory of the machine that nobody needs any more.
    let _ = fs::remove_dir_all(modules::DIR);
    let _ = fs::remove_file(modules::LIST);
    let _ = fs::remove_file("/init");
    std::env::set_current_dir(NEW_ROOT)
        .and_then(|()| Ok(mount_move(".", "/")?))
        .and_then(|()| Ok(rustix::process::chroot(".")?))
        .and_then(|()| std::env::set_current_dir("/"))
        .map_err(|err| format!("entering the new root: {err}"))
}

fn link_devices(dev: &Path) -> io::Result<()> {
    let links = [
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ];
    for (target, name) in links {
        symlink(target, dev.join(name))?;
    }
    // The kernel's own node leads to the terminals of the first /dev/pts, which is not this one.
    fs::remove_file(dev.join("ptmx"))?;
    symlink("pts/ptmx", dev.join("ptmx"))
}

/// Mounts the kernel's modules where `modprobe` looks for them, if the node has given them.
///
/// Errors: the place and what the kernel says.
pub fn mount_modules(device: Option<PathBuf>) -> Result<(), String> {
    let Some(device) = device else { return Ok(()) };
    let release = rustix::system::uname();
    let target = format!("/lib/modules/{}", release.release().to_string_lossy());
    let device = device.to_string_lossy();
    attach(&device, &target, "erofs", MountFlags::RDONLY, "")
}

/// A directory of the initramfs, which nobody sees any more after the move. Mounts may come from
/// it.
///
/// Errors: what the kernel says.
pub fn hidden_dir() -> io::Result<OwnedFd> {
    const PATH: &CStr = c"/hidden";
    make_dir(Path::new("/hidden"), 0o700)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(PATH, flags, Mode::empty())?)
}

/// Takes the console as standard input and output if the kernel has not given it.
pub fn take_console() {
    if rustix::io::fcntl_getfd(rustix::stdio::stderr()).is_ok() {
        return;
    }
    if let Ok(console) = File::options().read(true).write(true).open("/dev/console") {
        let _ = rustix::stdio::dup2_stdin(&console);
        let _ = rustix::stdio::dup2_stdout(&console);
        let _ = rustix::stdio::dup2_stderr(&console);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_disk_is_laid_out_and_a_used_one_is_kept() {
        let dir = crate::testing::TempDir::new();
        prepare_writable(dir.path(), &["169.254.0.1", "9.9.9.9"]).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join("upper/etc").join(name));
        assert_eq!(
            read("resolv.conf").unwrap(),
            "nameserver 169.254.0.1\nnameserver 9.9.9.9\noptions timeout:2 attempts:3\n"
        );
        assert_eq!(read("hostname").unwrap(), "opendsec\n");
        assert!(read("hosts").unwrap().ends_with("127.0.1.1\topendsec\n"));
        let mode = |path: &str| {
            let meta = fs::metadata(dir.path().join(path)).unwrap();
            meta.permissions().mode() & 0o7777
        };
        assert_eq!((mode("work"), mode("upper")), (0o700, 0o755));
        assert_eq!(mode("upper/etc/hosts"), 0o644);
        fs::write(dir.path().join("upper/etc/hosts"), "own").unwrap();
        fs::remove_file(dir.path().join("upper/etc/resolv.conf")).unwrap();
        symlink("/nowhere", dir.path().join("upper/etc/resolv.conf")).unwrap();
        prepare_writable(dir.path(), &[]).unwrap();
        assert_eq!(read("hosts").unwrap(), "own");
        assert!(read("resolv.conf").is_err());
    }
}
