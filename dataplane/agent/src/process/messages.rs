// SPDX-License-Identifier: Apache-2.0
//! Messages of `process.Process` (package `process` of the envd protocol).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::connect::RpcError;
use crate::connect::json::{opt_bytes, opt_u32, or_default};

/// What to run.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ProcessConfig {
    /// Program, looked for in `PATH` unless it has a slash.
    #[serde(
        deserialize_with = "or_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub cmd: String,
    /// Arguments without the program's name.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Variables on top of the sandbox's.
    #[serde(
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Size {
    /// Columns.
    #[serde(deserialize_with = "opt_u32")]
    pub cols: Option<u32>,
    /// Rows.
    #[serde(deserialize_with = "opt_u32")]
    pub rows: Option<u32>,
}

/// A terminal.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Its size.
    pub size: Option<Size>,
}

/// Request of `Start`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// What to run.
    pub process: Option<ProcessConfig>,
    /// Run it on a terminal.
    pub pty: Option<Pty>,
    /// A name to find it by.
    pub tag: Option<String>,
    /// Whether it gets a pipe as standard input; true if absent, for old clients.
    pub stdin: Option<bool>,
}

/// Names a process.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Selector {
    #[serde(deserialize_with = "opt_u32")]
    pid: Option<u32>,
    tag: Option<String>,
}

/// A process as a call names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessName {
    /// By process id.
    Pid(u32),
    /// By the tag of its start.
    Tag(String),
}

impl Selector {
    /// What is named.
    ///
    /// Errors: `invalid_argument` if nothing is.
    pub fn name(self) -> Result<ProcessName, RpcError> {
        match (self.pid, self.tag) {
            (Some(pid), _) => Ok(ProcessName::Pid(pid)),
            (None, Some(tag)) => Ok(ProcessName::Tag(tag)),
            (None, None) => Err(RpcError::invalid("process: give a pid or a tag")),
        }
    }
}

/// Bytes for a process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Input {
    /// For its standard input.
    #[serde(deserialize_with = "opt_bytes")]
    pub stdin: Option<Vec<u8>>,
    /// For its terminal.
    #[serde(deserialize_with = "opt_bytes")]
    pub pty: Option<Vec<u8>>,
}

/// Request of `Connect`, `CloseStdin`, `SendInput`, `SendSignal` and `Update`: each uses its part.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessRequest {
    /// The process.
    #[serde(deserialize_with = "or_default")]
    pub process: Selector,
    /// Of `SendInput`.
    pub input: Option<Input>,
    /// Of `SendSignal`.
    pub signal: Option<SignalName>,
    /// Of `Update`.
    pub pty: Option<Pty>,
}

/// One message of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    /// Names the process; comes first.
    pub start: Option<StreamInputStart>,
    /// Bytes.
    pub data: Option<StreamInputData>,
    /// Only keeps the connection.
    pub keepalive: Option<serde::de::IgnoredAny>,
}

/// First message of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputStart {
    /// The process.
    #[serde(deserialize_with = "or_default")]
    pub process: Selector,
}

/// Further messages of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputData {
    /// Bytes.
    #[serde(deserialize_with = "or_default")]
    pub input: Input,
}

/// A signal: the protocol names two, and any number is allowed.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum SignalName {
    /// By number.
    Number(i32),
    /// `SIGNAL_SIGTERM` or `SIGNAL_SIGKILL`.
    Name(String),
}

impl SignalName {
    /// The number.
    ///
    /// Errors: `unimplemented` for what is no signal.
    pub fn number(&self) -> Result<i32, RpcError> {
        let number = match self {
            SignalName::Number(number) => *number,
            SignalName::Name(name) => match name.as_str() {
                "SIGNAL_SIGTERM" => libc::SIGTERM,
                "SIGNAL_SIGKILL" => libc::SIGKILL,
                _ => 0,
            },
        };
        if (1..=64).contains(&number) {
            return Ok(number);
        }
        let message = "signal: give SIGNAL_SIGTERM, SIGNAL_SIGKILL or a number from 1 to 64";
        Err(RpcError::new(crate::connect::Code::Unimplemented, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_leniently() {
        let request: ProcessRequest =
            serde_json::from_str(r#"{"process":{"pid":"12"},"signal":9,"later":1}"#).unwrap();
        assert_eq!(request.process.name().unwrap(), ProcessName::Pid(12));
        assert_eq!(request.signal.unwrap().number().unwrap(), 9);
        let request: ProcessRequest =
            serde_json::from_str(r#"{"process":{"tag":"t"},"signal":"SIGNAL_SIGTERM"}"#).unwrap();
        assert_eq!(
            request.process.name().unwrap(),
            ProcessName::Tag("t".into())
        );
        assert_eq!(request.signal.unwrap().number().unwrap(), 15);
        let request: ProcessRequest = serde_json::from_str(r#"{"process":null}"#).unwrap();
        assert!(request.process.name().is_err());
        assert!(SignalName::Number(65).number().is_err());
        let start: StartRequest =
            serde_json::from_str(r#"{"process":{"cmd":"x","args":null,"envs":{"A":"b"}}}"#)
                .unwrap();
        assert_eq!(start.process.unwrap().envs["A"], "b");
    }

    #[test]
    fn configs_leave_out_defaults() {
        let config = ProcessConfig {
            cmd: "ls".into(),
            ..ProcessConfig::default()
        };
        assert_eq!(serde_json::to_string(&config).unwrap(), r#"{"cmd":"ls"}"#);
    }
}
