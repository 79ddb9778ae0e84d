// SPDX-License-Identifier: Apache-2.0
//! The guest agent of OpenDsec: PID 1 of every sandbox.
//!
//! It speaks the envd protocol (plain HTTP for files, Connect for processes and the file system),
//! tunnels to ports inside the sandbox, and does what an init does: it reaps orphans and ends
//! everything when it is told to stop.

mod agent;
mod auth;
mod connect;
mod control;
mod files;
mod fs;
mod http;
mod limits;
mod metrics;
mod paths;
mod process;
mod setup;
mod sys;
#[cfg(test)]
mod testing;
mod tunnel;
mod unpack;
mod users;
mod vm;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use rustix::process::Signal;
use tokio::net::{TcpListener, TcpSocket};

use crate::agent::{Agent, EndReason};
use crate::process::table::ProcessTable;
use crate::sys::{init, pool, reaper::Reaper};

const LISTEN_DEFAULT: &str = "0.0.0.0:49983";
const USAGE: &str = "usage: opendsec-agent [--listen ADDRESS:PORT] [--service] [--version]
  --service   of a full virtual machine: look after its clock, entropy and names too";

fn main() -> ExitCode {
    if vm::is_wanted() {
        init_of_vm();
    }
    let options = match parse_args(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => return ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("opendsec-agent: {message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if options.service
        && let Err(message) = vm::service::prepare()
    {
        eprintln!("opendsec-agent: {message}");
        return ExitCode::FAILURE;
    }
    init::prepare();
    match run(options.listen) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("opendsec-agent: {err}");
            ExitCode::FAILURE
        }
    }
}

/// The agent as the init of a virtual machine. Words of the kernel's command line that the kernel
/// does not know come as arguments, so those are not looked at.
fn init_of_vm() -> ! {
    vm::boot_or_stop();
    init::prepare();
    let address = LISTEN_DEFAULT.parse().map_err(io::Error::other);
    match address.and_then(run) {
        Ok(()) => vm::stop(),
        Err(err) => vm::stop_with(&err.to_string()),
    }
}

/// What the command line says.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    listen: SocketAddr,
    /// Of a machine with an init of its own.
    service: bool,
}

/// `None` if there is nothing more to do.
fn parse_args(mut args: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut listen = LISTEN_DEFAULT.to_owned();
    let mut service = false;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--listen" => listen = args.next().ok_or("--listen needs an address")?,
            "--service" => service = true,
            "--version" => {
                println!("opendsec-agent {}", env!("CARGO_PKG_VERSION"));
                return Ok(None);
            }
            "--help" => {
                println!("{USAGE}");
                return Ok(None);
            }
            other => return Err(format!("unknown argument '{other}'")),
        }
    }
    let listen = listen
        .parse()
        .map_err(|_| format!("'{listen}' is no address and port"))?;
    Ok(Some(Options { listen, service }))
}

fn run(listen: SocketAddr) -> io::Result<()> {
    pool::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let reaper = Reaper::start()?;
        let listener = listen_on(listen)?;
        let address = listener.local_addr()?;
        let proc_dir = Arc::new(std::fs::File::open("/proc")?.into());
        let is_init = std::process::id() == 1;
        let processes = Arc::new(ProcessTable::new(reaper));
        let agent = Arc::new(Agent::new(processes, proc_dir, is_init, address.port()));
        if vm::current().is_some_and(|vm| vm.is_service) {
            control::recall(&agent);
        }
        eprintln!(
            "opendsec-agent {} listens on {address}",
            env!("CARGO_PKG_VERSION")
        );
        tokio::spawn(trim_when_idle(Arc::clone(&agent)));
        tokio::select! {
            () = http::serve(listener, Arc::clone(&agent)) => {}
            stopped = init::stop_signal() => stopped?,
        }
        shut_down(&agent).await;
        Ok(())
    })
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    // A new agent takes the place of one that ended just now.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(limits::LISTEN_BACKLOG)
}

/// The agent shares the sandbox's memory limit with the user's programs, so what a burst of calls
/// has used must not stay with it.
async fn trim_when_idle(agent: Arc<Agent>) {
    let mut seen_ms = 0;
    loop {
        tokio::time::sleep(limits::IDLE_TRIM_INTERVAL).await;
        let last_ms = agent.last_activity_ms();
        if last_ms != seen_ms && agent.active_streams() == 0 {
            init::trim_heap();
            seen_ms = last_ms;
        }
    }
}

/// Ends streams with a clear error, then programs, first gently.
async fn shut_down(agent: &Agent) {
    agent.ending.send_replace(Some(EndReason::Killed));
    signal_programs(agent, Signal::TERM);
    let patience = tokio::time::Instant::now() + limits::SHUTDOWN_GRACE;
    while agent.processes.live_count() > 0 && tokio::time::Instant::now() < patience {
        tokio::time::sleep(limits::ACCEPT_RETRY_DELAY).await;
    }
    signal_programs(agent, Signal::KILL);
    // The last frames of the streams are still on their way.
    tokio::time::sleep(limits::ACCEPT_RETRY_DELAY).await;
}

fn signal_programs(agent: &Agent, signal: Signal) {
    if agent.is_init {
        init::signal_everyone(signal);
        return;
    }
    for process in agent.processes.list() {
        // One that has ended meanwhile is no concern.
        let _ = process.signal(signal.as_raw());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments() {
        let parse = |args: &[&str]| parse_args(args.iter().map(|arg| (*arg).to_owned()));
        let wanted = |listen: &str, service| {
            let listen = listen.parse().unwrap();
            Some(Options { listen, service })
        };
        assert_eq!(parse(&[]).unwrap(), wanted(LISTEN_DEFAULT, false));
        let given = parse(&["--listen", "127.0.0.1:1", "--service"]).unwrap();
        assert_eq!(given, wanted("127.0.0.1:1", true));
        assert!(parse(&["--listen"]).is_err());
        assert!(parse(&["--listen", "nowhere"]).is_err());
        assert!(parse(&["--what"]).is_err());
    }
}
