// SPDX-License-Identifier: Apache-2.0
//! Programs in the sandbox: starting, watching, feeding, ending them.

mod exit;
mod keep;
pub mod kept;
mod live;
mod messages;
mod output;
pub mod service;
mod shell;
pub mod spawn;
mod start;
mod streams;
pub mod table;
mod tree;
