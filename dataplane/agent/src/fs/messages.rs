// SPDX-License-Identifier: Apache-2.0
//! Messages of `filesystem.Filesystem` (package `filesystem` of the envd protocol).

use serde::Deserialize;

use crate::connect::json::{opt_u32, or_default};

/// Request of `Stat`, `MakeDir`, `Remove` and `ListDir`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    /// The path.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Of `ListDir`: levels below the path; 0 means 1.
    #[serde(deserialize_with = "opt_u32")]
    pub depth: Option<u32>,
}

/// Request of `Move`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    /// The present path.
    #[serde(deserialize_with = "or_default")]
    pub source: String,
    /// The new path.
    #[serde(deserialize_with = "or_default")]
    pub destination: String,
}

/// Request of `WatchDir` and `CreateWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatchRequest {
    /// The directory.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Whether directories below are watched too.
    #[serde(deserialize_with = "or_default")]
    pub recursive: bool,
    /// Whether events carry the entry.
    #[serde(deserialize_with = "or_default", alias = "include_entry")]
    pub include_entry: bool,
    /// Whether a network file system may be watched, although events of other machines are lost.
    #[serde(deserialize_with = "or_default", alias = "allow_network_mounts")]
    pub allow_network_mounts: bool,
}

/// Request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatcherRequest {
    /// The id that `CreateWatcher` gave.
    #[serde(deserialize_with = "or_default", alias = "watcher_id")]
    pub watcher_id: String,
}
