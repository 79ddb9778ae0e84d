// SPDX-License-Identifier: Apache-2.0
//! `opendsec-lazy`: makes indexes of layers, and serves layers of a remote store as local files.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use opendsec_lazy::cache::Cache;
use opendsec_lazy::config::Remote;
use opendsec_lazy::fetch::Layer;
use opendsec_lazy::index::Index;
use opendsec_lazy::mount::mount;
use opendsec_lazy::source::Source;
use opendsec_lazy::trace::{self, Recorder};
use opendsec_lazy::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::mount::{UnmountFlags, unmount};

/// Exit status when another process serves the layer already.
const SERVED_ALREADY: u8 = 3;
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// Traces are fetched by so many at once; readers have the other requests.
const PREFETCHERS: usize = 4;
/// The kernel should take sandboxes before what many of them stand on.
const OOM_SCORE: &str = "-500";

#[derive(Parser)]
#[command(
    name = "opendsec-lazy",
    version,
    about = "Layers of images on a remote store"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make the index of a layer's file. Prints its name and sizes as JSON.
    Index {
        /// The layer.
        file: PathBuf,
        /// File to make.
        #[arg(long)]
        out: PathBuf,
        /// Bytes that are fetched and checked as one.
        #[arg(long, default_value_t = 128 * 1024)]
        chunk_bytes: u32,
    },
    /// Check an index. Prints its name and sizes as JSON.
    Show {
        /// The index.
        index: PathBuf,
    },
    /// Serve the layer of a folder until SIGTERM. Prints `{}` once it is mounted.
    Serve {
        /// See `config`.
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("opendsec-lazy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Index {
            file,
            out,
            chunk_bytes,
        } => {
            let mut layer = File::open(&file).map_err(|e| Error::io(file.display(), &e))?;
            let index = Index::of(&mut layer, chunk_bytes)?;
            index.write(&out)?;
            tell(&index);
        }
        Command::Show { index } => tell(&load(&index)?),
        Command::Serve { folder } => return serve(&folder),
    }
    Ok(ExitCode::SUCCESS)
}

fn load(path: &Path) -> Result<Index> {
    Index::parse(&std::fs::read(path).map_err(|e| Error::io(path.display(), &e))?)
}

fn tell(index: &Index) {
    let told = serde_json::json!({
        "name": index.name(),
        "size_bytes": index.size,
        "chunk_bytes": index.chunk_bytes,
        "chunks": index.chunks(),
    });
    println!("{told}");
}

fn serve(folder: &Path) -> Result<ExitCode> {
    let signals = hold_signals();
    let folder = folder
        .canonicalize()
        .map_err(|e| Error::io(folder.display(), &e))?;
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(folder.join("lock"))
        .map_err(|e| Error::io("lock", &e))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("opendsec-lazy: another process serves this layer");
        return Ok(ExitCode::from(SERVED_ALREADY));
    }
    // Not for every user of the machine to say: only root may lower it.
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    let limits = Remote::load(&folder)?;
    let index = load(&folder.join("index"))?;
    let chunks = index.chunks();
    let cache = Cache::open(&folder, &index)?;
    let recorder = Arc::new(Recorder::new(
        &folder,
        chunks,
        Duration::from_secs_f64(limits.trace_s),
    ));
    let order = trace::load(&folder, chunks);
    let source = Source::parse(&limits.source)?;
    let layer = Arc::new(Layer::new(index, cache, source, limits));

    let target = folder.join("served");
    // What a killed process left: nobody can read it any more.
    while unmount(&target, UnmountFlags::DETACH).is_ok() {}
    let _ = std::fs::create_dir(&target);
    let session = mount(layer.clone(), recorder.clone(), &target)?;
    end_on(signals, &target, recorder.clone());
    prefetch(&layer, order);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(PROBE_EVERY);
            layer.probe();
            if let Err(error) = recorder.settle(false) {
                eprintln!("opendsec-lazy: {error}");
            }
        }
    });
    println!("{{}}");
    let _ = std::io::stdout().flush();
    session.run().map_err(|e| Error::io("serving", &e))?;
    Ok(ExitCode::SUCCESS)
}

/// In stretches, each by one thread, so that the trace's order is roughly kept.
fn prefetch(layer: &Arc<Layer>, order: Vec<u32>) {
    let order = Arc::new(order);
    for at in 0..PREFETCHERS {
        let (layer, order) = (layer.clone(), order.clone());
        std::thread::spawn(move || {
            for part in order.chunks(8).skip(at).step_by(PREFETCHERS) {
                layer.prefetch(part);
            }
        });
    }
}

/// SIGTERM and SIGINT wait from now on, in every thread that is begun later.
fn hold_signals() -> libc::sigset_t {
    // SAFETY: plain calls on a set of our own.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        set
    }
}

/// The session itself ends only when nothing uses the mount any more, which a loop device does.
fn end_on(signals: libc::sigset_t, target: &Path, recorder: Arc<Recorder>) {
    let target = target.to_owned();
    std::thread::spawn(move || {
        let mut signal = 0;
        // SAFETY: both point to what lives on this stack.
        while unsafe { libc::sigwait(&raw const signals, &raw mut signal) } != 0 {}
        let _ = recorder.settle(true);
        let _ = unmount(&target, UnmountFlags::DETACH);
        std::process::exit(0);
    });
}
