// SPDX-License-Identifier: Apache-2.0
//! Layers of images, as files.
//!
//! [`archive`] reads tar streams that nobody vouches for, [`unpack()`] puts them below a directory and
//! nowhere else. With the feature `program`, [`stream`] undoes compression and computes digests on
//! the way, [`pack`] makes an archive of an overlay's upper directory, and [`copy`] copies such a
//! directory; [`walk`] reads what a sandbox's root has written without being led astray.
#![cfg(target_os = "linux")]

pub mod archive;
#[cfg(feature = "program")]
pub mod copy;
pub mod error;
#[cfg(feature = "program")]
pub mod exclude;
#[cfg(feature = "program")]
pub mod pack;
pub mod root;
#[cfg(feature = "program")]
pub mod stream;
pub mod unpack;
#[cfg(feature = "program")]
pub mod walk;
pub mod xattrs;

pub use error::{Error, Kind, Result};
pub use unpack::{Options, Report, unpack};

/// Longest name of one file, in bytes (`NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;
/// Longest path inside a layer, in bytes: what a call to the kernel takes (`PATH_MAX`), less the
/// final NUL byte.
pub const PATH_BYTES_MAX: usize = 4095;
/// Most directories inside one another. More than any real image has, and few enough that whoever
/// makes a layer of the tree, or removes it, may do so by recursion.
pub const DEPTH_MAX: usize = 512;
