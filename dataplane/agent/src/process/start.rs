// SPDX-License-Identifier: Apache-2.0
//! From a `Start` request to a running program, and from its end to the table of ended ones.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::exit::Exit;
use super::keep;
use super::live::{Event, Feed, Process, winsize};
use super::messages::{ProcessConfig, Pty, StartRequest};
use super::output::{self, Source};
use super::shell;
use super::spawn::{self, Plan, REPORT_BYTES, Report, Step};
use super::tree;
use crate::agent::Agent;
use crate::connect::{Code, RpcError};
use crate::limits::{EXEC_BYTES_MAX, EXEC_TIMEOUT, ORPHAN_CHECK_INTERVAL};
use crate::paths;
use crate::sys::{init, pool, proc};
use crate::users::User;

const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const TERM_DEFAULT: &str = "xterm-256color";
/// Group of terminals in most systems, and the mode that goes with it: others may not write.
const TERMINAL_MODE: u32 = 0o620;

/// A started program with its first listener.
pub struct Started {
    /// The program.
    pub process: Arc<Process>,
    /// What it does, from its first byte on.
    pub events: mpsc::Receiver<Event>,
}

/// The agent's ends of what the program reads and writes.
struct Ends {
    feed: Feed,
    terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    outputs: Vec<(Source, Arc<AsyncFd<OwnedFd>>)>,
}

/// Starts a program. Must not be dropped before it is done: a program without a supervisor would
/// be left. At `deadline` it is killed with all its descendants.
///
/// Errors: `invalid_argument` for a request that cannot be started (missing program or working
/// directory), `resource_exhausted` if the sandbox has no room, `internal` else.
pub async fn start(
    agent: &Arc<Agent>,
    user: User,
    request: StartRequest,
    deadline: Option<Instant>,
) -> Result<Started, RpcError> {
    let place = agent.processes.reserve()?;
    let config = request.process.clone().unwrap_or_default();
    if config.cmd.is_empty() {
        return Err(RpcError::invalid("process.cmd is missing"));
    }
    let dir = working_dir(agent, &user, &config).await?;
    let env = environment(agent, &user, &config, request.pty.is_some())?;
    let program = shell::program(&config).await?;
    let (report, report_write) = pipe()?;
    let (stdio, ends) = connect_stdio(&request, &user)?;
    let limit = init::program_file_limit();
    let plan = Plan {
        candidates: candidates(&program, env.get("PATH").map(String::as_str), &dir)?,
        args: c_strings(std::iter::once(&program).chain(&config.args))?,
        env: c_strings(env.iter().map(|(name, value)| format!("{name}={value}")))?,
        dir: c_string(dir.as_str())?,
        uid: user.uid,
        gid: user.gid,
        groups: user.groups.clone(),
        stdio,
        terminal: request.pty.is_some(),
        report: report_write,
        files_limit: (
            limit.current.unwrap_or(libc::RLIM_INFINITY),
            limit.maximum.unwrap_or(libc::RLIM_INFINITY),
        ),
    };
    let report = async_fd(report)?;
    let keeper = spawn::spawn(&plan, agent.proc_dir.as_fd())
        .map_err(|err| RpcError::from_io("cannot start a process", &err))?;
    let keeper = proc::stat(agent.proc_dir.as_fd(), keeper);
    drop(plan);
    let mut forked = None;
    let loading = loaded(agent, &report, &config, &dir, &mut forked);
    let slow = format!("'{}' did not load in time: is its disk slow?", config.cmd);
    let loading = timeout(EXEC_TIMEOUT, loading).await;
    let pid = match loading.unwrap_or_else(|_| Err(RpcError::exhausted(slow))) {
        Ok(pid) => pid,
        Err(err) => {
            tree::abandon(agent, keeper);
            if let Some(pid) = forked {
                agent.processes.reaper.forget(pid);
            }
            return Err(err);
        }
    };
    let process = Arc::new(Process::new(
        u32::try_from(pid).unwrap_or_default(),
        keeper,
        config,
        request.tag,
        ends.feed,
        ends.terminal,
    ));
    let events = process.listen();
    if process.tag.as_deref() == Some(keep::TAG) {
        tokio::spawn(keep::keep(process.listen()));
    }
    agent.processes.enter(&process);
    drop(place);
    let readers = ends
        .outputs
        .into_iter()
        .map(|(source, fd)| tokio::spawn(output::read(Arc::clone(&process), fd, source)));
    let readers = readers.collect();
    tokio::spawn(supervise(
        Arc::clone(agent),
        Arc::clone(&process),
        report,
        readers,
    ));
    if let Some(deadline) = deadline {
        tokio::spawn(enforce(Arc::clone(agent), Arc::clone(&process), deadline));
    }
    Ok(Started { process, events })
}

/// Kills the command when its time is over, unless it has ended before.
async fn enforce(agent: Arc<Agent>, process: Arc<Process>, deadline: Instant) {
    tokio::select! {
        () = process.ended() => {}
        () = sleep_until(deadline) => {
            process.mark_timed_out();
            tree::kill(&agent, &process).await;
        }
    }
}

/// Waits for the end of a program and tells everybody.
async fn supervise(
    agent: Arc<Agent>,
    process: Arc<Process>,
    report: AsyncFd<OwnedFd>,
    readers: Vec<JoinHandle<()>>,
) {
    let pid = i32::try_from(process.pid).unwrap_or_default();
    let exit = match next_report(&report).await {
        Ok(Some(Report::Ended(status))) => Exit::from_wait_status(status),
        _ => end_of_orphan(&agent, pid).await,
    };
    agent.processes.reaper.forget(pid);
    process.main_ended.send_replace(true);
    for reader in readers {
        let _ = reader.await;
    }
    agent.processes.finish(&process, exit.clone());
    process.publish(Event::End(exit)).await;
}

/// The end of a program whose keeper was killed: it is or was a child of the agent.
async fn end_of_orphan(agent: &Agent, pid: i32) -> Exit {
    let mut status = agent.processes.reaper.status_of(pid);
    loop {
        tokio::select! {
            status = &mut status => return status.map_or(Exit::Lost, Exit::from_wait_status),
            () = sleep(ORPHAN_CHECK_INTERVAL) => {
                // Its status went elsewhere: nobody waits for ever.
                if proc::stat(agent.proc_dir.as_fd(), pid).is_none() {
                    return Exit::Lost;
                }
            }
        }
    }
}

async fn next_report(report: &AsyncFd<OwnedFd>) -> io::Result<Option<Report>> {
    loop {
        let mut ready = report.readable().await?;
        let mut raw = [0; REPORT_BYTES];
        let read = ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut raw)?));
        match read {
            Ok(Ok(REPORT_BYTES)) => return Ok(Report::decode(raw)),
            Ok(Ok(_)) => return Ok(None),
            Ok(Err(err)) if err.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(err)) => return Err(err),
            Err(_) => {}
        }
    }
}

/// Waits until the program is loaded; gives its pid, and notes it as soon as it is known.
async fn loaded(
    agent: &Agent,
    report: &AsyncFd<OwnedFd>,
    config: &ProcessConfig,
    dir: &str,
    pid: &mut Option<i32>,
) -> Result<i32, RpcError> {
    let lost = || RpcError::new(Code::Internal, "the process was killed at its start");
    loop {
        match next_report(report).await.map_err(|_| lost())? {
            Some(Report::Forked(forked)) => {
                // From now on its end is kept, whoever becomes its parent.
                agent.processes.reaper.watch(forked);
                *pid = Some(forked);
            }
            Some(Report::Loaded) => return (*pid).ok_or_else(lost),
            Some(Report::Failed(step, errno)) => {
                return Err(start_error(step, errno, &config.cmd, dir));
            }
            Some(Report::Ended(_)) => return Err(lost()),
            // The keeper is dead. A failure would be in the pipe, so the program runs or ran.
            None => return (*pid).ok_or_else(lost),
        }
    }
}

fn start_error(step: Step, errno: i32, cmd: &str, dir: &str) -> RpcError {
    let err = io::Error::from_raw_os_error(errno);
    let what = match step {
        Step::Fork => return RpcError::from_io("cannot start a process", &err),
        Step::Terminal => format!("cannot give '{cmd}' a terminal"),
        Step::Identity => return RpcError::from_io("cannot take the user's identity", &err),
        Step::Directory => format!("cannot enter directory '{dir}'"),
        Step::Exec if errno == libc::ENOENT => {
            return RpcError::invalid(format!("cannot run '{cmd}': {err}{}", shell::hint(cmd)));
        }
        Step::Exec => format!("cannot run '{cmd}'"),
    };
    if errno == libc::EAGAIN || errno == libc::ENOMEM {
        return RpcError::from_io(&what, &err);
    }
    RpcError::invalid(format!("{what}: {err}"))
}

async fn working_dir(
    agent: &Agent,
    user: &User,
    config: &ProcessConfig,
) -> Result<String, RpcError> {
    let default = agent.default_dir();
    let given = config.cwd.as_deref().unwrap_or_default();
    let dir = paths::resolve(given, user, default.as_deref())?;
    let checked = dir.clone();
    let is_dir = pool::run(move || std::fs::metadata(checked).map(|meta| meta.is_dir())).await;
    match is_dir.and_then(|inner| inner) {
        Ok(true) => Ok(dir),
        // Nobody asked for it: an image need not have the home of its user.
        Err(err) if given.is_empty() && err.kind() == io::ErrorKind::NotFound => Ok("/".to_owned()),
        Ok(false) => Err(RpcError::invalid(format!("cwd '{dir}' is not a directory"))),
        Err(err) if err.kind() == io::ErrorKind::NotFound => {
            Err(RpcError::invalid(format!("cwd '{dir}' does not exist")))
        }
        Err(err) => Err(RpcError::invalid(format!("cwd '{dir}': {err}"))),
    }
}

/// The sandbox's variables over the user's, the command's over both.
fn environment(
    agent: &Agent,
    user: &User,
    config: &ProcessConfig,
    terminal: bool,
) -> Result<BTreeMap<String, String>, RpcError> {
    let path = std::env::var("PATH").unwrap_or_default();
    let path = if path.is_empty() {
        PATH_DEFAULT.to_owned()
    } else {
        path
    };
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), path),
        ("HOME".to_owned(), user.home.clone()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
        ("SHELL".to_owned(), user.shell.clone()),
    ]);
    if terminal {
        env.insert("TERM".to_owned(), TERM_DEFAULT.to_owned());
    }
    env.extend(agent.settings().env.clone());
    env.extend(config.envs.clone());
    if env.keys().any(|name| name.is_empty() || name.contains('=')) {
        return Err(RpcError::invalid("envs: a name is empty or holds '='"));
    }
    let vars: usize = env
        .iter()
        .map(|(name, value)| name.len() + value.len() + 2)
        .sum();
    let args: usize = config.args.iter().map(|arg| arg.len() + 1).sum();
    if vars + args > EXEC_BYTES_MAX {
        return Err(RpcError::invalid(format!(
            "arguments and environment are over the limit of {EXEC_BYTES_MAX} bytes"
        )));
    }
    Ok(env)
}

/// The files that a program's name may mean, as a shell would look for it.
fn candidates(cmd: &str, path: Option<&str>, dir: &str) -> Result<Vec<CString>, RpcError> {
    if cmd.contains('/') {
        return Ok(vec![c_string(cmd)?]);
    }
    let found = path
        .unwrap_or(PATH_DEFAULT)
        .split(':')
        .map(|entry| match entry {
            "" => format!("{dir}/{cmd}"),
            entry => format!("{entry}/{cmd}"),
        });
    c_strings(found)
}

fn c_string(text: impl Into<Vec<u8>>) -> Result<CString, RpcError> {
    CString::new(text)
        .map_err(|_| RpcError::invalid("a NUL byte in the command, its arguments or environment"))
}

fn c_strings<T: AsRef<str>>(texts: impl Iterator<Item = T>) -> Result<Vec<CString>, RpcError> {
    texts.map(|text| c_string(text.as_ref())).collect()
}

fn connect_stdio(request: &StartRequest, user: &User) -> Result<([OwnedFd; 3], Ends), RpcError> {
    if let Some(pty) = request.pty {
        return connect_terminal(pty, user);
    }
    let (feed, input) = if request.stdin.unwrap_or(true) {
        let (read, write) = pipe()?;
        (Feed::Pipe(Arc::new(async_fd(write)?)), read)
    } else {
        let null = init::null().map_err(|err| RpcError::from_io("/dev/null", &err))?;
        (Feed::None, null)
    };
    let (stdout, stdout_write) = pipe()?;
    let (stderr, stderr_write) = pipe()?;
    let outputs = vec![
        (Source::Stdout, Arc::new(async_fd(stdout)?)),
        (Source::Stderr, Arc::new(async_fd(stderr)?)),
    ];
    Ok((
        [input, stdout_write, stderr_write],
        Ends {
            feed,
            terminal: None,
            outputs,
        },
    ))
}

/// Opens a pseudo-terminal that belongs to the user.
fn connect_terminal(pty: Pty, user: &User) -> Result<([OwnedFd; 3], Ends), RpcError> {
    let fail = |err: io::Error| RpcError::from_io("cannot open a terminal", &err);
    let open = || -> io::Result<(OwnedFd, OwnedFd)> {
        use rustix::pty::{OpenptFlags, openpt, unlockpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&master)?;
        rustix::termios::tcsetwinsize(&master, winsize(pty.size.unwrap_or_default()))?;
        // By its master and not by its name: /dev/pts may be hidden or another one.
        // SAFETY: TIOCGPTPEER (ioctl_tty(2)) takes flags and gives a new descriptor, which
        // nobody else owns.
        let slave = unsafe {
            let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
            let fd = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // Without this the user could not open its own terminal by name. A sandbox that may not
        // do it still has a working terminal.
        let _ = std::os::unix::fs::fchown(&slave, Some(user.uid), None);
        let _ = rustix::fs::fchmod(&slave, rustix::fs::Mode::from_raw_mode(TERMINAL_MODE));
        Ok((master, slave))
    };
    let (master, slave) = open().map_err(fail)?;
    let output = slave.try_clone().map_err(fail)?;
    let error = slave.try_clone().map_err(fail)?;
    let master = Arc::new(async_fd(master)?);
    let ends = Ends {
        feed: Feed::None,
        terminal: Some(Arc::clone(&master)),
        outputs: vec![(Source::Pty, master)],
    };
    Ok(([slave, output, error], ends))
}

fn pipe() -> Result<(OwnedFd, OwnedFd), RpcError> {
    pipe_with(PipeFlags::CLOEXEC)
        .map_err(|err| RpcError::from_io("cannot open a pipe", &err.into()))
}

/// The agent's end of a pipe, in non-blocking mode. The program's end keeps its blocking mode: the
/// two ends of a pipe are different files.
fn async_fd(fd: OwnedFd) -> Result<AsyncFd<OwnedFd>, RpcError> {
    rustix::io::ioctl_fionbio(&fd, true)
        .map_err(io::Error::from)
        // SAFETY: the descriptor is owned, so it stays open and the same as long as it is watched.
        .and_then(|()| Ok(unsafe { AsyncFd::register(fd) }?))
        .map_err(|err| RpcError::from_io("cannot watch a pipe", &err))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_looked_for_as_a_shell_does() {
        let text = |cmd: &str, path: Option<&str>| -> Vec<String> {
            let found = candidates(cmd, path, "/work").unwrap();
            found
                .into_iter()
                .map(|file| file.into_string().unwrap())
                .collect()
        };
        assert_eq!(text("/bin/ls", Some("/x")), ["/bin/ls"]);
        assert_eq!(text("./run", Some("/x")), ["./run"]);
        assert_eq!(text("ls", Some("/a:/b")), ["/a/ls", "/b/ls"]);
        assert_eq!(text("ls", Some(":/b")), ["/work/ls", "/b/ls"]);
        assert!(candidates("a\0b", None, "/").is_err());
    }

    #[test]
    fn start_errors_say_whose_fault_it_is() {
        use crate::connect::Code;
        let code = |step, errno| start_error(step, errno, "x", "/d").code;
        assert_eq!(code(Step::Exec, libc::ENOENT), Code::InvalidArgument);
        assert_eq!(code(Step::Directory, libc::EACCES), Code::InvalidArgument);
        assert_eq!(code(Step::Fork, libc::EAGAIN), Code::ResourceExhausted);
        assert_eq!(code(Step::Exec, libc::ENOMEM), Code::ResourceExhausted);
    }
}
