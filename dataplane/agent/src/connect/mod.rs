// SPDX-License-Identifier: Apache-2.0
//! The Connect protocol, server side, JSON codec: unary calls, server streams, client streams.
//! Source: <https://connectrpc.com/docs/protocol>.

pub mod call;
pub mod error;
pub mod frame;
pub mod json;
pub mod stream;

pub use error::{Code, RpcError};
