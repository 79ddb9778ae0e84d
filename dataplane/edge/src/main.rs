// SPDX-License-Identifier: Apache-2.0
//! The program `opendsec-edge`.

use std::process::ExitCode;

use clap::Parser;
use opendsec_edge::cli::Args;
use opendsec_edge::log::{self, Level};
use opendsec_edge::server;

fn main() -> ExitCode {
    let args = Args::parse();
    log::init(args.log_format, args.log_level);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(workers) = args.workers {
        builder.worker_threads(workers.max(1));
    }
    let outcome = match builder.enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(server::run(args));
            // Whatever is still open is closed with the process.
            runtime.shutdown_background();
            outcome
        }
        Err(error) => Err(format!("Cannot start worker threads: {error}")),
    };
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            log::event(Level::Error, "cannot_start", &[("error", why.into())]);
            ExitCode::FAILURE
        }
    };
    log::flush();
    code
}
