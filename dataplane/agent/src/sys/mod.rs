// SPDX-License-Identifier: Apache-2.0
//! The system below: worker threads, `/proc`, PID 1's duties.

pub mod init;
pub mod pool;
pub mod proc;
pub mod reaper;
