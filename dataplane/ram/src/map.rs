// SPDX-License-Identifier: Apache-2.0
//! Puts a file under the RAM of a VMM that has been started but runs no guest yet.
//!
//! Why not by the VMM's own options: QEMU before 8.2 maps a RAM file privately only if it may also
//! write to the file, and then punches holes into it when the guest gives memory back, which would
//! damage what other VMs are restored from. Here the VMM gets a descriptor that is open for reading
//! only, and its anonymous RAM is replaced by a private mapping of it: one mmap(2), made by the VMM's
//! main thread while it is held by ptrace(2).

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::process::{Mapping, read_memory};
use crate::{Error, Result};

const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_micros(200);
const STEPS_MAX: usize = 16;

/// Maps descriptor `fd` of process `pid`, from its start, privately over `range`.
#[cfg(target_arch = "x86_64")]
pub fn map_file(pid: i32, range: Range<u64>, fd: i32) -> Result<()> {
    let place = syscall_instruction(pid)?;
    let mut thread = Held::stop(pid)?;
    let before = thread.registers()?;
    let mut call = before;
    call.rip = place;
    call.orig_rax = u64::MAX;
    call.rax = libc::SYS_mmap as u64;
    call.rdi = range.start;
    call.rsi = range.end - range.start;
    call.rdx = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    call.r10 = (libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE) as u64;
    call.r8 = fd as u64;
    call.r9 = 0;
    thread.set_registers(&call)?;
    let stepped = thread.step();
    let after = thread.registers();
    thread.set_registers(&before)?;
    stepped?;
    let result = after?.rax as i64;
    if result == range.start as i64 {
        Ok(())
    } else {
        Err(Error {
            what: format!("process {pid} cannot map the RAM file"),
            cause: std::io::Error::from_raw_os_error((-result).clamp(1, 4095) as i32),
        })
    }
}

/// Other processors are not supported.
#[cfg(not(target_arch = "x86_64"))]
pub fn map_file(_pid: i32, _range: Range<u64>, _fd: i32) -> Result<()> {
    Err(Error::new(
        "mapping a RAM file into a running VMM is supported on x86_64 only",
    ))
}

/// Address of a `syscall` instruction in the process: every vDSO has one.
fn syscall_instruction(pid: i32) -> Result<u64> {
    let path = format!("/proc/{pid}/maps");
    let text = std::fs::read_to_string(&path).map_err(|cause| Error { what: path, cause })?;
    let vdso = text
        .lines()
        .find(|line| line.ends_with("[vdso]"))
        .and_then(crate::process::parse_mapping)
        .ok_or_else(|| Error::new(format!("process {pid} has no vDSO")))?;
    let Mapping { range, .. } = vdso;
    let mut code = vec![0u8; (range.end - range.start) as usize];
    read_memory(pid, range.start, &mut code)?;
    code.windows(2)
        .position(|bytes| bytes == [0x0f, 0x05])
        .map(|at| range.start + at as u64)
        .ok_or_else(|| Error::new(format!("the vDSO of process {pid} has no system call")))
}

/// A thread held by ptrace; let go when dropped, with the signals that came meanwhile.
struct Held {
    pid: i32,
    signal: i32,
}

impl Held {
    fn stop(pid: i32) -> Result<Self> {
        ptrace(libc::PTRACE_SEIZE, pid, 0, 0, "cannot attach to")?;
        let mut held = Self { pid, signal: 0 };
        ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0, "cannot interrupt")?;
        held.wait()?;
        Ok(held)
    }

    /// Waits for a stop; returns its signal.
    fn wait(&mut self) -> Result<i32> {
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            let mut status = 0;
            // SAFETY: `status` is valid for writing.
            let pid =
                unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL | libc::WNOHANG) };
            if pid < 0 {
                return Err(Error::last(format!("cannot wait for process {}", self.pid)));
            }
            if pid == self.pid {
                if !libc::WIFSTOPPED(status) {
                    return Err(Error::new(format!("process {} has ended", self.pid)));
                }
                return Ok(libc::WSTOPSIG(status));
            }
            if Instant::now() > deadline {
                return Err(Error::new(format!("process {} does not stop", self.pid)));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Executes one instruction.
    fn step(&mut self) -> Result<()> {
        for _ in 0..STEPS_MAX {
            ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, 0, "cannot step")?;
            let signal = self.wait()?;
            if signal == libc::SIGTRAP {
                return Ok(());
            }
            // Came before the instruction; it is delivered when the thread is let go.
            self.signal = signal;
        }
        Err(Error::new(format!(
            "process {} is kept busy by signals",
            self.pid
        )))
    }

    #[cfg(target_arch = "x86_64")]
    fn registers(&self) -> Result<libc::user_regs_struct> {
        // SAFETY: all-zero registers are valid.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let data = &raw mut registers as usize;
        ptrace(
            libc::PTRACE_GETREGS,
            self.pid,
            0,
            data,
            "cannot read the registers of",
        )?;
        Ok(registers)
    }

    #[cfg(target_arch = "x86_64")]
    fn set_registers(&self, registers: &libc::user_regs_struct) -> Result<()> {
        let data = &raw const *registers as usize;
        ptrace(
            libc::PTRACE_SETREGS,
            self.pid,
            0,
            data,
            "cannot set the registers of",
        )
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = ptrace(libc::PTRACE_DETACH, self.pid, 0, self.signal as usize, "");
    }
}

fn ptrace(request: libc::c_uint, pid: i32, address: usize, data: usize, what: &str) -> Result<()> {
    // SAFETY: `data` is a number or points to a register set of the right type and size.
    if unsafe { libc::ptrace(request, pid, address, data) } < 0 {
        return Err(Error::last(format!("{what} process {pid}")));
    }
    Ok(())
}
