// SPDX-License-Identifier: Apache-2.0
//! What the agent does to itself at the start, and how it stops.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::Mode;
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};

/// `/dev/null` as it was at the start.
static NULL: OnceLock<OwnedFd> = OnceLock::new();
/// The limit on open files that programs get: the one that the agent was started with.
static PROGRAM_FILES: OnceLock<Rlimit> = OnceLock::new();

/// Priority of the agent itself (nice(2)).
const AGENT_NICE: i32 = -10;

/// Protects the agent and makes its process fit for its work. Nothing here is fatal: the node may
/// have done it already, or the sandbox may not be allowed to.
pub fn prepare() {
    // Tokens are in memory: no other process may read it, and no core file may hold it.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    // Below the programs in the eyes of the OOM killer. Only a privileged process may lower this;
    // in a user namespace the node sets it from outside.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // A sandbox full of busy programs must still be reachable, to end them. Programs start with
    // the usual priority.
    let _ = rustix::process::setpriority_process(None, AGENT_NICE);
    // Orphans come to the agent even if it is not PID 1.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let _ = rustix::process::umask(Mode::from_raw_mode(0o022));
    let _ = null();
    raise_file_limit();
    bound_heap();
}

/// A new descriptor of `/dev/null` as it was at the start, whatever the sandbox did to `/dev`.
///
/// Errors: `EMFILE`, or why it could not be opened.
pub fn null() -> io::Result<OwnedFd> {
    let open = || {
        File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .map(OwnedFd::from)
    };
    if let Some(null) = NULL.get() {
        return null.try_clone();
    }
    let null = open()?;
    NULL.get_or_init(|| null).try_clone()
}

/// The limit on open files for programs.
pub fn program_file_limit() -> Rlimit {
    *PROGRAM_FILES.get_or_init(|| rustix::process::getrlimit(Resource::Nofile))
}

/// Each stream and tunnel needs descriptors, so the agent takes all it may have.
fn raise_file_limit() {
    let limit = program_file_limit();
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}

/// glibc keeps freed memory by default, per thread. The agent lives beside the user's programs in
/// their memory limit, so freed transfer buffers go back to the kernel.
fn bound_heap() {
    // SAFETY: mallopt(3) takes plain numbers and is called before any other thread exists.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // Above the size of transfer buffers: mapping those each time costs page faults.
        libc::mallopt(
            libc::M_MMAP_THRESHOLD,
            2 * crate::limits::FILE_CHUNK_BYTES as i32,
        );
        libc::mallopt(
            libc::M_TRIM_THRESHOLD,
            2 * crate::limits::FILE_CHUNK_BYTES as i32,
        );
    }
}

/// Gives free memory inside the heap back to the kernel.
pub fn trim_heap() {
    // SAFETY: malloc_trim(3) takes a plain number and the heap's own lock.
    unsafe { libc::malloc_trim(0) };
}

/// Waits for SIGTERM or SIGINT.
///
/// Errors: what installing the handlers says.
pub async fn stop_signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Signals every other process of the sandbox. Only for PID 1.
pub fn signal_everyone(signal: Signal) {
    // SAFETY: kill(2) with plain numbers. -1 means all processes but the caller, in this PID
    // namespace only, since the caller is its init.
    unsafe { libc::kill(-1, signal.as_raw()) };
}
