// SPDX-License-Identifier: Apache-2.0
//! Starting a program, below the keeper of its command.
//!
//! When a command's time is over, *all* it started must end, also what called `setsid`, forked
//! twice, or cleared its environment. A container gives its PID 1 no writable cgroup, and a
//! process whose parent is gone becomes a child of PID 1 like any other. So each command gets a
//! small parent of its own, the *keeper*: a fork of the agent that is a child subreaper
//! (prctl(2), `PR_SET_CHILD_SUBREAPER`). Orphans of the command fall to the keeper and not to
//! PID 1, so they stay below it in the tree until the command itself ends. The keeper reports
//! over a pipe and goes when the command ends; what the command left running then belongs to
//! PID 1.
//!
//! The keeper runs on a copy of a multi-threaded process, so it may only make system calls:
//! no memory is taken, no lock, nothing that may unwind.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use crate::limits::CHILD_OOM_SCORE_ADJ;

/// The name of keepers in lists of processes.
const KEEPER_NAME: &CStr = c"opendsec-keeper";
/// Bytes of one report.
pub const REPORT_BYTES: usize = 12;
const KIND_FORKED: i32 = 1;
const KIND_LOADED: i32 = 2;
const KIND_FAILED: i32 = 3;
const KIND_ENDED: i32 = 4;

/// A report of the keeper, or of the program before it is loaded. If the pipe closes without an
/// end, the keeper was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The program's process has this pid. It says so itself, before it loads the program: what
    /// is loaded may kill the keeper before that could say anything.
    Forked(i32),
    /// The program is loaded.
    Loaded,
    /// It could not be started: step and `errno`.
    Failed(Step, i32),
    /// It ended with this wait status.
    Ended(i32),
}

/// The step of starting that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Making the process.
    Fork,
    /// Taking the terminal.
    Terminal,
    /// Taking the user's identity.
    Identity,
    /// Entering the working directory.
    Directory,
    /// Loading the program.
    Exec,
}

impl Step {
    fn from_number(number: i32) -> Self {
        match number {
            0 => Step::Fork,
            1 => Step::Terminal,
            2 => Step::Identity,
            3 => Step::Directory,
            _ => Step::Exec,
        }
    }
}

impl Report {
    /// Reads a report from the pipe.
    pub fn decode(raw: [u8; REPORT_BYTES]) -> Option<Self> {
        let word = |at: usize| i32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        match word(0) {
            KIND_FORKED => Some(Report::Forked(word(4))),
            KIND_LOADED => Some(Report::Loaded),
            KIND_FAILED => Some(Report::Failed(Step::from_number(word(4)), word(8))),
            KIND_ENDED => Some(Report::Ended(word(4))),
            _ => None,
        }
    }
}

/// All that the child needs, made ready before the fork.
pub struct Plan {
    /// Program files to try, in the order of `PATH`.
    pub candidates: Vec<CString>,
    /// Arguments, the name first.
    pub args: Vec<CString>,
    /// Environment, `NAME=value`.
    pub env: Vec<CString>,
    /// Working directory.
    pub dir: CString,
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All groups.
    pub groups: Vec<u32>,
    /// Standard input, output and error. The same descriptor may stand several times.
    pub stdio: [OwnedFd; 3],
    /// Whether standard input is a terminal that becomes the controlling one.
    pub terminal: bool,
    /// Where reports go.
    pub report: OwnedFd,
    /// Limit of open files: soft, hard.
    pub files_limit: (u64, u64),
}

/// Forks the keeper, which starts the program. Reports come through the pipe.
///
/// Errors: those of fork(2); `EAGAIN` if the sandbox has no room for more processes.
pub fn spawn(plan: &Plan, proc_dir: BorrowedFd<'_>) -> io::Result<i32> {
    let args = pointers(&plan.args);
    let env = pointers(&plan.env);
    let prepared = Prepared {
        plan,
        args: &args,
        env: &env,
        proc_dir: proc_dir.as_raw_fd(),
    };
    // SAFETY: signal sets are initialised by sigfillset before use. Between fork and _exit the
    // child makes only async-signal-safe calls, on memory prepared above. All signals are blocked
    // across the fork, so no handler of the agent runs in the child.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let pid = libc::fork();
        if pid == 0 {
            keep(&prepared);
        }
        let result = if pid < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(pid)
        };
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        result
    }
}

struct Prepared<'a> {
    plan: &'a Plan,
    args: &'a [*const libc::c_char],
    env: &'a [*const libc::c_char],
    proc_dir: RawFd,
}

fn pointers(texts: &[CString]) -> Vec<*const libc::c_char> {
    texts
        .iter()
        .map(|text| text.as_ptr())
        .chain([ptr::null()])
        .collect()
}

/// The keeper's life.
///
/// SAFETY: only in a fresh fork with all signals blocked; never returns.
unsafe fn keep(prepared: &Prepared<'_>) -> ! {
    let plan = prepared.plan;
    let report = plan.report.as_raw_fd();
    let [input, output, error] = [0, 1, 2].map(|i| plan.stdio[i].as_raw_fd());
    // SAFETY: system calls with plain numbers and prepared pointers only.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, KEEPER_NAME.as_ptr());
        // The copies of the agent's connections must not live on here.
        close_all_but(&mut [report, input, output, error, prepared.proc_dir]);
        // CLONE_VFORK holds the keeper until the program is loaded or has failed, so that a
        // failure is in the pipe before the success is.
        let flags = libc::c_long::from(libc::CLONE_VFORK | libc::SIGCHLD);
        let pid = libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) as i32;
        if pid == 0 {
            become_program(prepared);
        }
        if pid < 0 {
            tell(
                report,
                KIND_FAILED,
                Step::Fork as i32,
                *libc::__errno_location(),
            );
            libc::_exit(1);
        }
        close_all_but(&mut [report, report, report, report, report]);
        tell(report, KIND_LOADED, 0, 0);
        loop {
            let mut status = 0;
            let dead = libc::waitpid(-1, &raw mut status, 0);
            if dead == pid {
                tell(report, KIND_ENDED, status, 0);
                libc::_exit(0);
            }
            if dead < 0 && *libc::__errno_location() == libc::ECHILD {
                libc::_exit(1);
            }
        }
    }
}

/// Turns the process into the program.
///
/// SAFETY: only in a fresh fork with all signals blocked; never returns.
unsafe fn become_program(prepared: &Prepared<'_>) -> ! {
    let plan = prepared.plan;
    let report = plan.report.as_raw_fd();
    // SAFETY: system calls with plain numbers and prepared pointers only.
    unsafe {
        let fail = |step: Step| -> ! {
            tell(report, KIND_FAILED, step as i32, *libc::__errno_location());
            libc::_exit(127)
        };
        tell(report, KIND_FORKED, libc::getpid(), 0);
        libc::setsid();
        if plan.terminal && libc::ioctl(plan.stdio[0].as_raw_fd(), libc::TIOCSCTTY, 0) != 0 {
            fail(Step::Terminal);
        }
        be_killable(prepared.proc_dir);
        for (target, fd) in (0..).zip(&plan.stdio) {
            libc::dup2(fd.as_raw_fd(), target);
        }
        libc::setpriority(libc::PRIO_PROCESS, 0, 0);
        let files = libc::rlimit {
            rlim_cur: plan.files_limit.0,
            rlim_max: plan.files_limit.1,
        };
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
        libc::umask(0o022);
        if !take_identity(plan) {
            fail(Step::Identity);
        }
        if libc::chdir(plan.dir.as_ptr()) != 0 {
            fail(Step::Directory);
        }
        reset_signals();
        let mut reason = libc::ENOENT;
        for file in &plan.candidates {
            libc::execve(file.as_ptr(), prepared.args.as_ptr(), prepared.env.as_ptr());
            let errno = *libc::__errno_location();
            // A file that is there but cannot be run says more than one that is not there.
            if errno != libc::ENOENT && errno != libc::ENOTDIR {
                reason = errno;
            }
        }
        *libc::__errno_location() = reason;
        fail(Step::Exec)
    }
}

/// Programs go before the agent when memory is short. Raising the score is always allowed.
///
/// SAFETY: system calls only; `proc_dir` is an open directory.
unsafe fn be_killable(proc_dir: RawFd) {
    const { assert!(CHILD_OOM_SCORE_ADJ == 100) };
    // SAFETY: the texts are static and NUL-terminated; the length is that of the text.
    unsafe {
        let file = c"self/oom_score_adj".as_ptr();
        let fd = libc::openat(proc_dir, file, libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"100".as_ptr().cast(), 3);
            libc::close(fd);
        }
    }
}

/// Takes user and groups. An agent that is not root can only stay who it is.
///
/// SAFETY: system calls only.
unsafe fn take_identity(plan: &Plan) -> bool {
    // SAFETY: `groups` outlives the call and its length is given.
    unsafe {
        if libc::geteuid() != 0 {
            return libc::geteuid() == plan.uid;
        }
        // A user namespace may forbid setgroups(2); one that stays root gains nothing by it.
        let grouped = libc::setgroups(plan.groups.len(), plan.groups.as_ptr()) == 0;
        (grouped || plan.uid == 0)
            && libc::setresgid(plan.gid, plan.gid, plan.gid) == 0
            && libc::setresuid(plan.uid, plan.uid, plan.uid) == 0
    }
}

/// Handlers do not survive exec, but ignored signals do, and so does the mask.
///
/// SAFETY: system calls only.
unsafe fn reset_signals() {
    /// Size of the kernel's signal set, and the last signal.
    const KERNEL_SET_BYTES: usize = 8;
    const SIGNAL_LAST: i32 = 64;
    // The kernel's own structure (handler, flags, restorer, mask): all zero is the default action.
    // glibc's function refuses two of the signals, and they may have been ignored before.
    let default = [0u64; 4];
    // SAFETY: `default` is as large as the kernel's structure on 64-bit systems; the set is
    // initialised by sigemptyset before use.
    unsafe {
        for number in 1..=SIGNAL_LAST {
            let action = default.as_ptr();
            let no_old = ptr::null_mut::<u64>();
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                action,
                no_old,
                KERNEL_SET_BYTES,
            );
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// Closes every descriptor from 3 up that is not named.
///
/// SAFETY: system calls only; nobody uses the closed descriptors afterwards.
unsafe fn close_all_but(kept: &mut [RawFd; 5]) {
    kept.sort_unstable();
    let mut from = 3;
    for fd in *kept {
        // SAFETY: as for this function.
        unsafe { close_span(from, fd - 1) };
        from = from.max(fd + 1);
    }
    // SAFETY: as for this function.
    unsafe { close_span(from, RawFd::MAX) };
}

/// Closes the descriptors `first..=last`.
///
/// SAFETY: system calls only; nobody uses the closed descriptors afterwards.
unsafe fn close_span(first: RawFd, last: RawFd) {
    /// Where the loop for kernels before 5.9 stops: the agent rarely has more.
    const LOOP_END: RawFd = 8192;
    if first > last {
        return;
    }
    // SAFETY: plain numbers.
    unsafe {
        if libc::syscall(libc::SYS_close_range, first, last, 0) != 0 {
            for fd in first..=last.min(LOOP_END) {
                libc::close(fd);
            }
        }
    }
}

/// Writes one report. Reports are shorter than `PIPE_BUF`, so they are never mixed.
///
/// SAFETY: system calls only.
unsafe fn tell(report: RawFd, kind: i32, first: i32, second: i32) {
    let words = [kind, first, second];
    // SAFETY: `words` is REPORT_BYTES long and lives across the call.
    unsafe { libc::write(report, words.as_ptr().cast(), REPORT_BYTES) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(words: [i32; 3]) -> [u8; REPORT_BYTES] {
        let mut raw = [0; REPORT_BYTES];
        for (index, word) in words.iter().enumerate() {
            raw[index * 4..index * 4 + 4].copy_from_slice(&word.to_ne_bytes());
        }
        raw
    }

    #[test]
    fn reports_come_back() {
        let read = |words| Report::decode(encode(words));
        assert_eq!(read([KIND_FORKED, 7, 0]), Some(Report::Forked(7)));
        assert_eq!(
            read([KIND_FAILED, Step::Directory as i32, libc::ENOENT]),
            Some(Report::Failed(Step::Directory, libc::ENOENT))
        );
        assert_eq!(read([KIND_ENDED, 256, 0]), Some(Report::Ended(256)));
        assert_eq!(read([KIND_LOADED, 0, 0]), Some(Report::Loaded));
        assert_eq!(read([9, 0, 0]), None);
    }
}
