// SPDX-License-Identifier: Apache-2.0
//! `opendsec-layer`: layers of images. Prints one JSON object; an error is one too, on standard
//! error.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use opendsec_layer::archive::Limits;
use opendsec_layer::exclude::Exclude;
use opendsec_layer::pack::{Compression, pack};
use opendsec_layer::stream::Stream;
use opendsec_layer::unpack::Attributes;
use opendsec_layer::walk::Source;
use opendsec_layer::{Error, Kind, Options, Result, copy, unpack};
use serde_json::{Value, json};

#[derive(Parser)]
#[command(
    name = "opendsec-layer",
    version,
    about = "Layers of OpenDsec's images",
    after_help = "Exit status: 0 done, 3 damaged or hostile input, 4 not what the digest says, \
                  5 larger than allowed, 6 no space, 1 any other failure."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct Bounds {
    /// Most bytes, decompressed; and of all files together, holes counted.
    #[arg(long, default_value_t = u64::MAX)]
    bytes_max: u64,
    /// Most files, directories and links.
    #[arg(long, default_value_t = u64::MAX)]
    entries_max: u64,
}

impl Bounds {
    fn limits(&self) -> Limits {
        Limits {
            bytes_max: self.bytes_max,
            entries_max: self.entries_max,
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Unpack a layer (tar; plain, gzip or zstd) as overlayfs takes it.
    Unpack {
        /// Empty directory to fill.
        #[arg(long)]
        into: PathBuf,
        /// The layer; `-` for standard input.
        #[arg(long, default_value = "-")]
        blob: PathBuf,
        /// Digest that the blob must have.
        #[arg(long)]
        expect_blob: Option<String>,
        /// Digest that the decompressed blob must have.
        #[arg(long)]
        expect_diff: Option<String>,
        #[command(flatten)]
        bounds: Bounds,
    },
    /// Write a layer of an overlay's upper directory, or of any tree, to standard output. The
    /// report is the last line on standard error.
    Pack {
        /// The directory.
        #[arg(long)]
        from: PathBuf,
        /// Leave out what matches, and everything below it; may be given again.
        #[arg(long)]
        exclude: Vec<String>,
        /// Compress with gzip.
        #[arg(long, conflicts_with = "zstd")]
        gzip: bool,
        /// Compress with zstd.
        #[arg(long)]
        zstd: bool,
        #[command(flatten)]
        bounds: Bounds,
    },
    /// Copy an overlay's upper directory, as the lower layer that it will be.
    CopyUpper {
        /// The upper directory. It may hold anything.
        #[arg(long)]
        from: PathBuf,
        /// Empty directory to fill.
        #[arg(long)]
        into: PathBuf,
        /// Leave out what matches, and everything below it; may be given again.
        #[arg(long)]
        exclude: Vec<String>,
        /// The same, but whiteouts stay: what was deleted does not come back from a lower layer.
        #[arg(long)]
        scrub: Vec<String>,
        #[command(flatten)]
        bounds: Bounds,
    },
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|err| Error::system(&format!("cannot open {}", path.display()), err))
}

fn require_digest(what: &str, expected: Option<&String>, have: &str) -> Result<()> {
    match expected {
        Some(expected) if expected != have => Err(Error::new(
            Kind::Mismatch,
            format!("the {what} is {have}, not {expected}"),
        )),
        _ => Ok(()),
    }
}

fn run_unpack(
    into: &Path,
    blob: &Path,
    expect: (Option<String>, Option<String>),
    limits: Limits,
) -> Result<Value> {
    let input: Box<dyn Read + Send> = if blob == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(open(blob)?)
    };
    let dir = open(into)?;
    let mut stream = Stream::new(input)?;
    let options = Options {
        limits,
        is_layer: true,
        owner: None,
        mode: None,
        attributes: Attributes::Archive,
    };
    let report = match unpack(&mut stream, dir.as_fd(), options) {
        Ok(report) => report,
        Err(err) => {
            if err.kind == Kind::Invalid && expect.0.is_some() {
                // What was damaged on its way is not the fault of who made it.
                require_digest("blob", expect.0.as_ref(), &stream.finish()?.blob)?;
            }
            return Err(err);
        }
    };
    let digests = stream.finish()?;
    require_digest("blob", expect.0.as_ref(), &digests.blob)?;
    require_digest("decompressed blob", expect.1.as_ref(), &digests.diff)?;
    Ok(json!({
        "blob": digests.blob,
        "diff": digests.diff,
        "bytes": report.bytes,
        "entries": report.entries,
        "opaque_root": report.opaque_root,
    }))
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Unpack {
            into,
            blob,
            expect_blob,
            expect_diff,
            bounds,
        } => {
            let expect = (expect_blob, expect_diff);
            println!("{}", run_unpack(&into, &blob, expect, bounds.limits())?);
        }
        Command::Pack {
            from,
            exclude,
            gzip,
            zstd,
            bounds,
        } => {
            let compression = match (gzip, zstd) {
                (true, _) => Compression::Gzip,
                (_, true) => Compression::Zstd,
                _ => Compression::None,
            };
            let (exclude, none) = (Exclude::new(&exclude)?, Exclude::new(&[])?);
            let source = Source::new(&open(&from)?, exclude, none, bounds.limits())?;
            let (digests, bytes) = pack(source, io::stdout(), compression)?;
            let report = json!({"blob": digests.blob, "diff": digests.diff, "bytes": bytes});
            eprintln!("{report}");
        }
        Command::CopyUpper {
            from,
            into,
            exclude,
            scrub,
            bounds,
        } => {
            let (exclude, scrub) = (Exclude::new(&exclude)?, Exclude::new(&scrub)?);
            let source = Source::new(&open(&from)?, exclude, scrub, bounds.limits())?;
            let report = copy::copy_upper(source, open(&into)?.as_fd())?;
            println!(
                "{}",
                json!({"bytes": report.bytes, "entries": report.entries})
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    // Modes are exactly those that are asked for.
    rustix::process::umask(rustix::fs::Mode::empty());
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("{}", json!({"error": err.what, "entry": err.entry}));
            ExitCode::from(match err.kind {
                Kind::Invalid => 3,
                Kind::Mismatch => 4,
                Kind::Limit => 5,
                Kind::NoSpace => 6,
                Kind::Other => 1,
            })
        }
    }
}
