// SPDX-License-Identifier: Apache-2.0
//! Fresh randomness for a virtual machine (random(4)): two machines restored from one snapshot
//! would otherwise draw the same numbers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The most that is taken in one call.
pub const BYTES_MAX: usize = 512;
/// Mixes in bytes and counts their entropy; `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
/// Makes every processor's generator draw a new seed at once; `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// `rand_pool_info` of the kernel.
#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    bytes: libc::c_int,
    data: [u8; BYTES_MAX],
}

/// Mixes bytes into the kernel's generator and makes it use them from now on.
///
/// Errors: `InvalidInput` if there are too many or no bytes; what the kernel says.
pub fn add(random: impl AsFd, entropy: &[u8]) -> io::Result<()> {
    if entropy.is_empty() || entropy.len() > BYTES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut info = PoolInfo {
        entropy_bits: (entropy.len() * 8) as libc::c_int,
        bytes: entropy.len() as libc::c_int,
        data: [0; BYTES_MAX],
    };
    info.data[..entropy.len()].copy_from_slice(entropy);
    let fd = random.as_fd().as_raw_fd();
    // SAFETY: the structure is as the kernel has it, with at least `bytes` bytes of data; the
    // second call takes no argument.
    let taken = unsafe {
        libc::ioctl(fd, RNDADDENTROPY, &raw const info) == 0
            && libc::ioctl(fd, RNDRESEEDCRNG, 0) == 0
    };
    let done = if taken {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    };
    // What seeds a generator must not stay in memory.
    for byte in &mut info.data {
        // SAFETY: a valid, exclusive reference.
        unsafe { std::ptr::write_volatile(byte, 0) };
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let null = std::fs::File::open("/dev/null").unwrap();
        for size in [0, BYTES_MAX + 1] {
            let err = add(&null, &vec![0; size]).unwrap_err();
            assert_eq!(err.kind(), io::ErrorKind::InvalidInput);
        }
        let err = add(&null, &[1; 64]).unwrap_err();
        assert_eq!(err.raw_os_error(), Some(libc::ENOTTY));
    }
}
