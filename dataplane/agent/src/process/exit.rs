// SPDX-License-Identifier: Apache-2.0
//! How a program ended, in the words that clients of the protocol know.

use serde_json::{Map, Value};

/// The end of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It returned this code.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// The signal's number.
        number: i32,
        /// Whether a core file was written.
        core: bool,
    },
    /// Nobody could learn how it ended.
    Lost,
}

impl Exit {
    /// Reads a status of wait(2).
    pub fn from_wait_status(status: i32) -> Self {
        if libc::WIFSIGNALED(status) {
            Exit::Signal {
                number: libc::WTERMSIG(status),
                core: libc::WCOREDUMP(status),
            }
        } else {
            Exit::Code(libc::WEXITSTATUS(status))
        }
    }

    /// The `end` event. Fields with default values are left out, as proto3 JSON does.
    pub fn to_json(&self) -> Value {
        let mut end = Map::new();
        let status = match self {
            Exit::Code(code) => {
                if *code != 0 {
                    end.insert("exitCode".into(), (*code).into());
                }
                end.insert("exited".into(), true.into());
                format!("exit status {code}")
            }
            Exit::Signal { number, core } => {
                end.insert("exitCode".into(), (-1).into());
                let core = if *core { " (core dumped)" } else { "" };
                format!("signal: {}{core}", signal_text(*number))
            }
            Exit::Lost => {
                end.insert("exitCode".into(), (-1).into());
                "exit status is not known".to_owned()
            }
        };
        if *self != Exit::Code(0) {
            end.insert("error".into(), status.clone().into());
        }
        end.insert("status".into(), status.into());
        Value::Object(end)
    }
}

/// The description of a signal, as signal(7) and strsignal(3) have it, in lower case.
fn signal_text(number: i32) -> String {
    let text = match number {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        libc::SIGSYS => "bad system call",
        _ => return format!("signal {number}"),
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ends_read_as_clients_expect() {
        let wait = Exit::from_wait_status;
        assert_eq!(
            wait(0).to_json(),
            json!({"exited": true, "status": "exit status 0"})
        );
        assert_eq!(
            wait(3 << 8).to_json(),
            json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"})
        );
        assert_eq!(
            wait(9).to_json(),
            json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"})
        );
        assert_eq!(
            wait(11 | 0x80).to_json()["status"],
            "signal: segmentation fault (core dumped)"
        );
        assert_eq!(wait(40).to_json()["status"], "signal: signal 40");
    }
}
