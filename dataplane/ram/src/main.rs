// SPDX-License-Identifier: Apache-2.0
//! `opendsec-ram`: memory of virtual machines. Prints one JSON object, or one line of error.

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use opendsec_ram::launch::{Launch, launch};
use opendsec_ram::process::{Ram, find_ram, ram_file};
use opendsec_ram::save::{Base, save};
use opendsec_ram::sums::Sums;
use opendsec_ram::{Context, Error, Result, map, require_page_size, tsc};

/// Exit status of `check` when the file is not what was written.
const DAMAGED: u8 = 3;

#[derive(Parser)]
#[command(
    name = "opendsec-ram",
    version,
    about = "Memory of OpenDsec's virtual machines"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Which mapping is the RAM.
#[derive(Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// It is a private mapping of this file, of the file's length.
    #[arg(long)]
    file: Option<PathBuf>,
    /// It is the process's only anonymous mapping of this many bytes.
    #[arg(long)]
    anonymous: Option<u64>,
}

impl Which {
    fn ram(&self) -> Result<Ram> {
        match (&self.file, self.anonymous) {
            (Some(path), _) => ram_file(&open(path)?),
            (None, Some(len)) => Ok(Ram::Anonymous { len }),
            (None, None) => Err(Error::new("neither --file nor --anonymous is given")),
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Write the RAM of a stopped VM, and its sums, to new files.
    Save {
        /// The VMM.
        #[arg(long)]
        pid: i32,
        #[command(flatten)]
        which: Which,
        /// File that unchanged pages are taken from: the one the RAM is mapped from.
        #[arg(long)]
        base: Option<PathBuf>,
        /// Sums of the base; without it, the base is read to compute them.
        #[arg(long, requires = "base")]
        base_sums: Option<PathBuf>,
        /// File to make.
        #[arg(long)]
        out: PathBuf,
        /// File of sums to make.
        #[arg(long)]
        sums: PathBuf,
    },
    /// Compute the sums of a file.
    Sums {
        /// What to read.
        #[arg(long)]
        file: PathBuf,
        /// File of sums to make.
        #[arg(long)]
        out: PathBuf,
    },
    /// Compare a file with its sums. Exit status 3: it is not what was written.
    Check {
        /// What to read.
        #[arg(long)]
        file: PathBuf,
        /// Its sums.
        #[arg(long)]
        sums: PathBuf,
    },
    /// Put a file under the RAM of a VMM that runs no guest yet.
    Map {
        /// The VMM.
        #[arg(long)]
        pid: i32,
        /// The RAM's length in bytes.
        #[arg(long)]
        bytes: u64,
        /// The file: a descriptor of the VMM, open for reading.
        #[arg(long)]
        fd: i32,
    },
    /// Become a VMM: join groups and namespace, open the tap, give up root, execute.
    Exec {
        /// Directory of a control group to join; may be given again.
        #[arg(long)]
        cgroup: Vec<PathBuf>,
        /// Descriptor of the network namespace.
        #[arg(long)]
        netns: Option<i32>,
        /// `NAME=FD`: attach to this tap, for the program at this descriptor.
        #[arg(long, value_parser = parse_tap)]
        tap: Option<(String, i32)>,
        /// User to run as.
        #[arg(long)]
        uid: u32,
        /// Group to run as.
        #[arg(long)]
        gid: u32,
        /// Further group; may be given again.
        #[arg(long)]
        group: Vec<u32>,
        /// Program and arguments.
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// Measure the time stamp counter.
    Tsc,
}

fn parse_tap(text: &str) -> std::result::Result<(String, i32), String> {
    let (name, fd) = text.split_once('=').ok_or("NAME=FD is expected")?;
    Ok((name.to_owned(), fd.parse().map_err(|_| "FD is a number")?))
}

fn open(path: &std::path::Path) -> Result<File> {
    File::open(path).context(|| format!("cannot open {}", path.display()))
}

/// Whether an error means bad content: malformed, or the disk cannot give it back.
fn is_damage(error: &Error) -> bool {
    error.cause.kind() == std::io::ErrorKind::InvalidData
        || error.cause.raw_os_error() == Some(libc::EIO)
}

fn run(command: Command) -> Result<ExitCode> {
    let answer = match command {
        Command::Save {
            pid,
            which,
            base,
            base_sums,
            out,
            sums,
        } => {
            let range = find_ram(pid, which.ram()?)?;
            let base_file = base.as_deref().map(open).transpose()?;
            let base = match (&base_file, base_sums) {
                (None, _) => None,
                (Some(file), Some(path)) => Some(Base {
                    file,
                    sums: Sums::read(&path)?,
                }),
                (Some(file), None) => Some(Base {
                    file,
                    sums: Sums::of(file)?,
                }),
            };
            let (report, computed) = save(pid, range, base, &out)?;
            computed.write(&sums)?;
            serde_json::json!(report)
        }
        Command::Sums { file, out } => {
            let sums = Sums::of(&open(&file)?)?;
            sums.write(&out)?;
            serde_json::json!({ "total_bytes": sums.len })
        }
        Command::Check { file, sums } => {
            let opened = open(&file)?;
            let result = Sums::read(&sums).and_then(|sums| Ok((sums.len, sums.check(&opened)?)));
            let wrong = match result {
                Ok((_, wrong)) => wrong,
                Err(error) if is_damage(&error) => Some(error.to_string()),
                Err(error) => return Err(error),
            };
            if let Some(wrong) = wrong {
                eprintln!("{}: {wrong}", file.display());
                return Ok(ExitCode::from(DAMAGED));
            }
            serde_json::json!({ "total_bytes": opened.metadata().map_or(0, |meta| meta.len()) })
        }
        Command::Map { pid, bytes, fd } => {
            let range = find_ram(pid, Ram::Anonymous { len: bytes })?;
            let file = open(std::path::Path::new(&format!("/proc/{pid}/fd/{fd}")))?;
            let ram = ram_file(&file)?;
            if !matches!(ram, Ram::File { len, .. } if len == bytes) {
                return Err(Error::new("the RAM file's length is not the RAM's"));
            }
            map::map_file(pid, range.clone(), fd)?;
            if find_ram(pid, ram)? != range {
                return Err(Error::new("the RAM file is not where it should be"));
            }
            serde_json::json!({ "total_bytes": bytes })
        }
        Command::Exec {
            cgroup,
            netns,
            tap,
            uid,
            gid,
            group,
            argv,
        } => {
            match launch(&Launch {
                cgroups: cgroup,
                netns,
                tap,
                uid,
                gid,
                groups: group,
                argv,
            })? {}
        }
        Command::Tsc => serde_json::json!({ "tsc_khz": tsc::tsc_khz()? }),
    };
    println!("{answer}");
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    match require_page_size().and_then(|()| run(command)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("opendsec-ram: {error}");
            ExitCode::FAILURE
        }
    }
}
