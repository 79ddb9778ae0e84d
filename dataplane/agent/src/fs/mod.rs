// SPDX-License-Identifier: Apache-2.0
//! The file system of the sandbox: entries, directories, moves, watches.

pub mod copy;
pub mod entry;
mod list;
mod messages;
pub mod metadata;
mod ops;
pub mod service;
pub mod watch;
