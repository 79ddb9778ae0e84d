// SPDX-License-Identifier: Apache-2.0
//! Loading kernel modules from the initramfs. The list is in the right order already.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::cmdline::Cmdline;

/// Where the initramfs has its modules.
pub const DIR: &str = "/modules";
/// Their names, one a line, in the order of loading.
pub const LIST: &str = "/modules.list";

/// Loads all modules of the list. One that does not load is told on the console and is no error:
/// whether something is missing shows when the devices are looked for.
///
/// Errors: the list cannot be read.
pub fn load_all(cmdline: &Cmdline) -> io::Result<()> {
    for file in std::fs::read_to_string(LIST)?.lines() {
        let file = file.trim();
        if file.is_empty() {
            continue;
        }
        let parameters = cmdline.module_parameters(&module_name(file));
        match load(&Path::new(DIR).join(file), &parameters) {
            // Built in, or loaded by another one.
            Err(err) if err.raw_os_error() == Some(libc::EEXIST) => {}
            // The machine has no such device.
            Err(err) if err.raw_os_error() == Some(libc::ENODEV) => {}
            Err(err) => eprintln!("opendsec-init: module {file}: {err}"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// `virtio_rng` for `07-virtio-rng.ko`.
fn module_name(file: &str) -> String {
    let name = file.strip_suffix(".ko").unwrap_or(file);
    let name = name.split_once('-').map_or(name, |(_, name)| name);
    name.replace('-', "_")
}

fn load(path: &Path, parameters: &str) -> io::Result<()> {
    let file = File::open(path)?;
    let parameters = CString::new(parameters)?;
    // SAFETY: finit_module(2) with an open file and a terminated text that outlives the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            parameters.as_ptr(),
            0,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(module_name("07-virtio-rng.ko"), "virtio_rng");
        assert_eq!(module_name("00-virtio.ko"), "virtio");
    }
}
