// SPDX-License-Identifier: Apache-2.0
//! Copies an overlay's upper directory to where a layer is made of it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{ftruncate, ioctl_ficlone};
use rustix::io::Errno;

use crate::archive::Limits;
use crate::error::{Error, Result};
use crate::unpack::{Attributes, Options, Report, Unpacker};
use crate::walk::Source;
use crate::xattrs;

/// Copies a tree below `into`, which should be empty. Content is shared with the source where the
/// file system can do that; holes stay holes.
///
/// Errors: as [`Source::walk`] and [`Unpacker::entry`].
pub fn copy_upper(mut source: Source, into: BorrowedFd<'_>) -> Result<Report> {
    let options = Options {
        limits: Limits {
            bytes_max: u64::MAX,
            entries_max: u64::MAX,
        },
        is_layer: false,
        owner: None,
        mode: None,
        attributes: Attributes::All,
    };
    let mut target = Unpacker::new(into, options)?;
    let mut opaque_root = false;
    source.walk(|mut item| {
        if item.is_opaque {
            opaque_root |= item.entry.path.is_empty();
            let mark = (xattrs::OPAQUE.into(), b"y".to_vec());
            item.entry.xattrs.push(mark);
        }
        let size = item.entry.size;
        target.entry(&item.entry, |file| match &mut item.file {
            Some(from) => copy_content(from, file, size),
            None => Ok(()),
        })
    })?;
    target.finish();
    Ok(Report {
        bytes: source.content(),
        entries: source.entries(),
        opaque_root,
    })
}

fn copy_content(from: &mut File, to: &OwnedFd, size: u64) -> Result<()> {
    if size == 0 || ioctl_ficlone(to, from.as_fd()).is_ok() {
        return Ok(());
    }
    let failed = |err: std::io::Error| Error::system("cannot copy", err);
    let mut to = File::from(to.try_clone().map_err(failed)?);
    let mut at = 0;
    while at < size {
        // Only what is there is read, however long the file claims to be.
        at = match rustix::fs::seek(&*from, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => break,
            Err(err) => return Err(Error::of_path("cannot find the content", err)),
        };
        let end = rustix::fs::seek(&*from, rustix::fs::SeekFrom::Hole(at))
            .map_err(|err| Error::of_path("cannot find the content", err))?
            .min(size);
        if end <= at {
            break;
        }
        from.seek(SeekFrom::Start(at)).map_err(failed)?;
        to.seek(SeekFrom::Start(at)).map_err(failed)?;
        // std copies this inside the kernel.
        std::io::copy(&mut Read::take(&*from, end - at), &mut to).map_err(failed)?;
        at = end;
    }
    ftruncate(&to, size).map_err(|err| Error::of_path("cannot set the length", err))
}
