// SPDX-License-Identifier: Apache-2.0
//! Images without bash, or without any shell.
//!
//! Clients of this protocol run a command as `/bin/bash -l -c COMMAND` and open a terminal with
//! `/bin/bash -i -l`. Small images (alpine, busybox) have only `/bin/sh`; it takes these options
//! too. Any other use of bash means bash.

use std::path::Path;

use super::messages::ProcessConfig;
use crate::connect::RpcError;
use crate::sys::pool;

const BASH: &str = "/bin/bash";
const SH: &str = "/bin/sh";
/// Names of shells, for the hint.
const SHELLS: [&str; 6] = [BASH, SH, "/usr/bin/bash", "/usr/bin/sh", "bash", "sh"];

/// The program to run for a command.
///
/// Errors: no worker is to be had.
pub async fn program(config: &ProcessConfig) -> Result<String, RpcError> {
    if config.cmd != BASH || !any_shell_will_do(&config.args) {
        return Ok(config.cmd.clone());
    }
    let only_sh = pool::run(|| !is_there(BASH) && is_there(SH)).await;
    let only_sh = only_sh.map_err(|err| RpcError::from_io("looking for a shell", &err))?;
    Ok(if only_sh { SH } else { BASH }.to_owned())
}

/// `-l` and `-i` in any order, and at most one command.
fn any_shell_will_do(args: &[String]) -> bool {
    let mut rest = args;
    while let [first, more @ ..] = rest
        && (first == "-l" || first == "-i")
    {
        rest = more;
    }
    matches!(rest, []) || matches!(rest, [option, _] if option == "-c")
}

/// Also a link that leads nowhere is no shell.
fn is_there(path: &str) -> bool {
    Path::new(path).exists()
}

/// What to add to the error of a program that is not there.
pub fn hint(cmd: &str) -> &'static str {
    if !SHELLS.contains(&cmd) {
        ""
    } else if is_there(SH) {
        "; the image has /bin/sh but no bash"
    } else {
        "; the image has no shell: run one of its programs directly, by its path and arguments"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_every_shell_can_do() {
        let check = |args: &[&str]| {
            let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
            any_shell_will_do(&args)
        };
        assert!(check(&["-l", "-c", "echo"]));
        assert!(check(&["-i", "-l"]));
        assert!(check(&["-c", "echo"]));
        assert!(check(&[]));
        assert!(!check(&["script"]));
        assert!(!check(&["-c"]));
        assert!(!check(&["-lc", "echo"]));
        assert!(!check(&["-l", "-c", "echo", "name"]));
        assert!(!check(&["--norc", "-c", "echo"]));
    }

    #[test]
    fn hints_are_for_shells() {
        assert_eq!(hint("ls"), "");
        assert!(hint("/bin/bash").starts_with("; the image"));
    }
}
