// SPDX-License-Identifier: Apache-2.0
//! Turns this process into a VMM that has no rights: joins its control groups and its network
//! namespace, opens its tap, gives up root, and executes the program. The pid stays the same.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::{Context, Error, Result};

/// What to become.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Directories of control groups.
    pub cgroups: Vec<PathBuf>,
    /// Descriptor of a network namespace.
    pub netns: Option<i32>,
    /// Name of a persistent tap in it, and the descriptor number that the program expects it at.
    pub tap: Option<(String, i32)>,
    /// User; never 0.
    pub uid: u32,
    /// Group; never 0.
    pub gid: u32,
    /// Further groups (that of /dev/kvm).
    pub groups: Vec<u32>,
    /// Program (a path) and its arguments.
    pub argv: Vec<std::ffi::OsString>,
}

/// Does it. Returns only on failure.
pub fn launch(plan: &Launch) -> Result<std::convert::Infallible> {
    if plan.uid == 0 || plan.gid == 0 || plan.groups.contains(&0) {
        return Err(Error::new("a VMM does not run as root"));
    }
    let argv = plan
        .argv
        .iter()
        .map(|text| CString::new(text.as_bytes()))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| Error::new("an argument contains a NUL"))?;
    if argv.is_empty() {
        return Err(Error::new("no program is named"));
    }
    for cgroup in &plan.cgroups {
        let path = cgroup.join("cgroup.procs");
        OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|mut file| file.write_all(b"0"))
            .context(|| format!("cannot join {}", path.display()))?;
    }
    if let Some(fd) = plan.netns {
        // SAFETY: plain numbers.
        let code = unsafe { libc::setns(fd, libc::CLONE_NEWNET) };
        check(code, "cannot join the network namespace")?;
        // SAFETY: the descriptor was given to us for this only.
        unsafe { libc::close(fd) };
    }
    if let Some((name, fd)) = &plan.tap {
        open_tap(name, *fd)?;
    }
    let no_core = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `no_core` outlives the call.
    let code = unsafe { libc::setrlimit(libc::RLIMIT_CORE, &no_core) };
    check(code, "cannot forbid core dumps")?;
    // SAFETY: plain numbers.
    unsafe { libc::umask(0o077) };
    // SAFETY: plain numbers.
    let code = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    check(code, "no_new_privs")?;
    // SAFETY: the list outlives the call and has the stated length.
    let code = unsafe { libc::setgroups(plan.groups.len(), plan.groups.as_ptr()) };
    check(code, "setgroups")?;
    // Changing from user 0 to another clears every capability.
    // SAFETY: plain numbers.
    let code = unsafe { libc::setresgid(plan.gid, plan.gid, plan.gid) };
    check(code, "setresgid")?;
    // SAFETY: plain numbers.
    let code = unsafe { libc::setresuid(plan.uid, plan.uid, plan.uid) };
    check(code, "setresuid")?;
    let mut pointers: Vec<_> = argv.iter().map(|text| text.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: a NULL-terminated list of strings that live until the call.
    unsafe { libc::execv(pointers[0], pointers.as_ptr()) };
    Err(Error::last(format!(
        "cannot execute {}",
        plan.argv[0].to_string_lossy()
    )))
}

fn check(code: libc::c_int, what: &str) -> Result<()> {
    if code < 0 {
        Err(Error::last(what))
    } else {
        Ok(())
    }
}

#[repr(C)]
struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// `_IOW('T', 202, int)`, linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

fn open_tap(name: &str, fd: i32) -> Result<()> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context(|| "cannot open /dev/net/tun".into())?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let mut request = InterfaceRequest {
        name: [0; libc::IFNAMSIZ],
        flags: flags as libc::c_short,
        rest: [0; 22],
    };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ {
        return Err(Error::new(format!("{name:?} is no name of a link")));
    }
    // A name that does not exist would make a new tap, that nobody configures.
    if !std::path::Path::new("/proc/self/net/dev").exists() || !link_exists(name) {
        return Err(Error::new(format!(
            "there is no tap {name} in the network namespace"
        )));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the request is a valid `struct ifreq` of 40 bytes.
    let code = unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF, &raw mut request) };
    check(code, &format!("cannot attach to tap {name}"))?;
    let raw = device.into_raw_fd();
    // dup2 also clears close-on-exec, unless both are the same.
    if raw == fd {
        // SAFETY: plain numbers.
        let code = unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
        check(code, "cannot keep the tap open")
    } else {
        // SAFETY: plain numbers.
        let code = unsafe { libc::dup2(raw, fd) };
        check(code, "cannot place the tap")?;
        // SAFETY: `raw` is ours.
        unsafe { libc::close(raw) };
        Ok(())
    }
}

fn link_exists(name: &str) -> bool {
    let Ok(text) = CString::new(name) else {
        return false;
    };
    // SAFETY: a NUL-terminated string.
    unsafe { libc::if_nametoindex(text.as_ptr()) != 0 }
}
