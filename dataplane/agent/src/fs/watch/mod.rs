// SPDX-License-Identifier: Apache-2.0
//! Watching directories (inotify(7)).

mod pump;
pub mod service;
mod table;
mod tree;

pub use table::WatcherTable;
