// SPDX-License-Identifier: Apache-2.0
//! The agent as the first program of a virtual machine: from the kernel's hands to a machine that
//! looks like any other sandbox.
//!
//! The same binary is `/init` of the initramfs. It loads the modules that the machine's devices
//! need, joins the read-only layers and the writable disk to a root file system, moves into it and
//! sets the network up; then it goes on as the usual agent. All it needs to know stands on the
//! kernel's command line:
//!
//! | parameter | meaning |
//! |---|---|
//! | `opendsec.vm=1` | this is such a machine |
//! | `opendsec.layers=2` | how many disks `layer0`, `layer1`… there are, the topmost first |
//! | `opendsec.modules=1` | there is a disk `modules` with the kernel's modules |
//! | `opendsec.disks=`, `opendsec.pmem=` | names of disks without serials, see `disks` |
//! | `opendsec.ip=169.254.0.21/30` | address; none: no network but `lo` |
//! | `opendsec.gw=169.254.0.22` | the way out |
//! | `opendsec.dns=169.254.0.1` | name servers, with commas |
//! | `opendsec.mac=02:…` | hardware address of the device to use; none: the first one |
//!
//! Whatever fails is told in one line on the console, `opendsec-init: …`, and the machine stops.

pub mod clock;
mod cmdline;
mod disks;
pub mod entropy;
pub mod identity;
mod modules;
mod network;
mod pressure;
mod root;
pub mod service;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::system::RebootCommand;

use self::cmdline::Cmdline;
use self::disks::Disks;
use self::identity::BootId;

/// How long devices may take to appear.
const DEVICES_TIMEOUT: Duration = Duration::from_secs(10);
const DEVICES_PAUSE: Duration = Duration::from_millis(2);
/// Limits of open files that programs get, as in a container sandbox.
const FILES_SOFT: u64 = 16_384;
const FILES_HARD: u64 = 1_048_576;
/// Memory that the kernel keeps for itself at least, so that the agent stays reachable over the
/// network when programs have taken all the rest.
const RESERVE_KIB: u64 = 4096;
/// A machine whose programs take all memory would drop and read again the pages of their code for
/// minutes before it calls itself out of memory. With the multi-generational LRU it does so as soon
/// as what was used in the last second does not fit.
const WORKING_SET_MS: &str = "1000";

/// What the agent keeps of its time as init.
pub struct Vm {
    /// The kernel's random generator, whatever the sandbox does to `/dev`.
    pub random: OwnedFd,
    /// The writable disk.
    disk: OwnedFd,
    /// The boot id that programs see.
    pub boot_id: BootId,
    /// Whether another program is the machine's init.
    pub is_service: bool,
}

static VM: OnceLock<Vm> = OnceLock::new();

/// The machine that the agent is the init of; `None` in a container or anywhere else.
pub fn current() -> Option<&'static Vm> {
    VM.get()
}

/// Whether this process is the init of a fresh virtual machine. A container inside such a machine
/// sees the same command line, but it has no initramfs.
pub fn is_wanted() -> bool {
    std::process::id() == 1 && Path::new(modules::LIST).exists()
}

/// Sets the machine up. If that fails, says why on the console and stops the machine.
pub fn boot_or_stop() {
    if let Err(message) = boot() {
        stop_with(&message);
    }
}

/// Says why on the console and stops the machine.
pub fn stop_with(message: &str) -> ! {
    eprintln!("opendsec-init: {message}");
    let _ = rustix::termios::tcdrain(rustix::stdio::stderr());
    stop()
}

/// Writes out what is not on disk and ends the machine. A restart, not a power-off: every VMM ends
/// on it, but not every one has a power switch.
pub fn stop() -> ! {
    rustix::fs::sync();
    let _ = rustix::system::reboot(RebootCommand::Restart);
    // A refusal leaves only the kernel's own panic, which ends the machine as well.
    std::process::exit(1)
}

fn boot() -> Result<(), String> {
    let began = Instant::now();
    let _ = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    root::mount_kernel_files()?;
    root::take_console();
    let cmdline = Cmdline::read().map_err(|err| format!("/proc/cmdline: {err}"))?;
    if cmdline.get("opendsec.vm") != Some("1") {
        return Err("opendsec.vm=1 is not on the kernel's command line".into());
    }
    let layers = cmdline
        .number("opendsec.layers")?
        .filter(|count| *count > 0);
    let layers = layers.ok_or("opendsec.layers is missing")?;
    let address = cmdline.address()?;
    let gateway = cmdline.get("opendsec.gw").map(|text| {
        let malformed = |_| format!("opendsec.gw={text} is no address");
        text.parse().map_err(malformed)
    });
    let gateway = gateway.transpose()?;
    modules::load_all(&cmdline).map_err(|err| format!("{}: {err}", modules::LIST))?;

    let with_modules = cmdline.get("opendsec.modules") == Some("1");
    let disks = wait_for_disks(&cmdline, layers, with_modules)?;
    let disk = root::assemble(&disks, layers, &cmdline.list("opendsec.dns"))?;
    let hidden = root::hidden_dir().map_err(|err| format!("/hidden: {err}"))?;
    root::enter(memory_bytes())?;
    root::mount_modules(disks.get("modules").map(Path::to_owned))?;
    if let Err(err) = network::start_loopback() {
        return Err(format!("network device lo: {err}"));
    }
    if let Some(address) = address {
        let device = wait_for_network(cmdline.get("opendsec.mac"))?;
        network::start(&device, address, gateway)
            .map_err(|err| format!("network device {device}: {err}"))?;
    }
    set_limits();
    if let Err(err) = pressure::start() {
        eprintln!("opendsec-init: no watch over memory: {err}");
    }
    // The name by which it is known in a container, too.
    let _ = rustix::thread::set_name(c"opendsec-agent");
    let _ = rustix::system::sethostname(root::HOSTNAME_DEFAULT.as_bytes());
    let random = File::options().read(true).write(true).open("/dev/urandom");
    let random = random.map_err(|err| format!("/dev/urandom: {err}"))?.into();
    let boot_id = BootId::new(hidden);
    let _ = VM.set(Vm {
        random,
        disk,
        boot_id,
        is_service: false,
    });
    eprintln!(
        "opendsec-init: ready, {} ms after the kernel",
        began.elapsed().as_millis()
    );
    Ok(())
}

fn wait_for_disks(cmdline: &Cmdline, layers: usize, with_modules: bool) -> Result<Disks, String> {
    let mut wanted: Vec<String> = (0..layers).map(|index| format!("layer{index}")).collect();
    wanted.push("disk".into());
    if with_modules {
        wanted.push("modules".into());
    }
    let mut disks = Disks::default();
    let found = within_timeout(|| {
        disks = Disks::look(cmdline, Path::new("/sys/block"));
        disks.missing(&wanted).is_empty().then_some(())
    });
    match found {
        Some(()) => Ok(disks),
        None => Err(format!("no disk {}", disks.missing(&wanted).join(", "))),
    }
}

fn wait_for_network(mac: Option<&str>) -> Result<String, String> {
    within_timeout(|| network::find_device(Path::new(network::SYS_NET), mac)).ok_or_else(|| {
        let which = mac.map_or(String::new(), |mac| format!(" with the address {mac}"));
        format!("no network device{which}")
    })
}

/// Looks until there is something, for a stated time.
fn within_timeout<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + DEVICES_TIMEOUT;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(DEVICES_PAUSE);
    }
}

fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
}

/// The limits that the container runtime sets elsewhere.
fn set_limits() {
    let limit = |current, maximum| Rlimit {
        current: Some(current),
        maximum: Some(maximum),
    };
    let _ = setrlimit(Resource::Nofile, limit(FILES_SOFT, FILES_HARD));
    let _ = setrlimit(Resource::Core, limit(0, 0));
    // A kernel without it goes on as before.
    let lru = Path::new("/sys/kernel/mm/lru_gen");
    let _ = fs::write(lru.join("enabled"), "y");
    let _ = fs::write(lru.join("min_ttl_ms"), WORKING_SET_MS);
    let reserve = Path::new("/proc/sys/vm/min_free_kbytes");
    let now = fs::read_to_string(reserve).unwrap_or_default();
    if now.trim().parse::<u64>().is_ok_and(|kib| kib < RESERVE_KIB) {
        let _ = fs::write(reserve, RESERVE_KIB.to_string());
    }
}

impl Vm {
    /// Writes everything to the disk, so that its content makes sense on its own: also the
    /// journal is emptied, where the file system can be held for a moment.
    ///
    /// Errors: what the kernel says.
    pub fn sync(&self) -> io::Result<()> {
        /// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)`.
        const FIFREEZE: libc::Ioctl = 0xc004_5877;
        const FITHAW: libc::Ioctl = 0xc004_5878;
        if self.is_service {
            // It may have more disks than the one below `/`.
            rustix::fs::sync();
        }
        rustix::fs::syncfs(&self.disk)?;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.disk.as_fd());
        // SAFETY: both calls ignore their argument.
        unsafe {
            if libc::ioctl(fd, FIFREEZE, 0) == 0 && libc::ioctl(fd, FITHAW, 0) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}
