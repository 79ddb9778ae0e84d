// SPDX-License-Identifier: Apache-2.0
//! The static network of a virtual machine: `lo`, one Ethernet device, one route (netdevice(7)).

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::cmdline::Address;

/// Where devices are seen.
pub const SYS_NET: &str = "/sys/class/net";
const ETHERNET: &str = "1";
const MTU: i32 = 1500;

/// Settings that a container sandbox has as well: no IPv6, every port open to every user, ping
/// without privileges.
const SETTINGS: [(&str, &str); 4] = [
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv6/conf/{device}/disable_ipv6", "1"),
    ("ipv4/ip_unprivileged_port_start", "0"),
    ("ipv4/ping_group_range", "0 2147483647"),
];

/// The device to use: that of the hardware address if one is given, else the first Ethernet one.
pub fn find_device(sys_net: &Path, mac: Option<&str>) -> Option<String> {
    let read = |name: &str, file: &str| {
        let text = fs::read_to_string(sys_net.join(name).join(file));
        text.unwrap_or_default().trim().to_lowercase()
    };
    let entries = fs::read_dir(sys_net).ok()?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names: Vec<_> = names.flat_map(|name| name.into_string()).collect();
    names.retain(|name| name != "lo" && read(name, "type") == ETHERNET);
    names.sort();
    match mac {
        Some(mac) => names
            .into_iter()
            .find(|name| read(name, "address") == mac.to_lowercase()),
        None => names.into_iter().next(),
    }
}

/// Brings up `lo`.
///
/// Errors: what the kernel says.
pub fn start_loopback() -> io::Result<()> {
    Link::new("lo")?.up()
}

/// Gives a device its address, and the machine its way out.
///
/// Errors: what the kernel says.
pub fn start(device: &str, address: Address, gateway: Option<Ipv4Addr>) -> io::Result<()> {
    for (name, value) in SETTINGS {
        let name = name.replace("{device}", device);
        // A kernel without IPv6 has no such setting.
        let _ = fs::write(Path::new("/proc/sys/net").join(name), value);
    }
    let link = Link::new(device)?;
    link.set(libc::SIOCSIFMTU, |request| {
        request.ifr_ifru.ifru_mtu = MTU;
    })?;
    link.set(libc::SIOCSIFADDR, |request| {
        request.ifr_ifru.ifru_addr = socket_address(address.ip);
    })?;
    link.set(libc::SIOCSIFNETMASK, |request| {
        request.ifr_ifru.ifru_netmask = socket_address(netmask(address.prefix));
    })?;
    link.up()?;
    gateway.map_or(Ok(()), |gateway| link.route_by(gateway))
}

fn netmask(prefix: u32) -> Ipv4Addr {
    let host = u32::MAX.checked_shr(prefix).unwrap_or(0);
    Ipv4Addr::from_bits(!host)
}

fn socket_address(ip: Ipv4Addr) -> libc::sockaddr {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(ip.octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: both are plain structures of the same size; sockaddr is the general form of it.
    unsafe { std::mem::transmute(address) }
}

/// One network device.
struct Link {
    socket: std::os::fd::OwnedFd,
    request: libc::ifreq,
}

impl Link {
    fn new(name: &str) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
        // SAFETY: all zero is a valid `ifreq`: an empty name and a zero of each kind of value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (target, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *target = byte as libc::c_char;
        }
        Ok(Self { socket, request })
    }

    fn set(&self, call: libc::Ioctl, fill: impl FnOnce(&mut libc::ifreq)) -> io::Result<()> {
        let mut request = self.request;
        fill(&mut request);
        // SAFETY: these calls take an `ifreq` and keep no pointer to it.
        checked(unsafe { libc::ioctl(self.socket.as_fd().as_raw_fd(), call, &raw mut request) })
    }

    fn up(&self) -> io::Result<()> {
        self.set(libc::SIOCSIFFLAGS, |request| {
            request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
        })
    }

    fn route_by(&self, gateway: Ipv4Addr) -> io::Result<()> {
        // SAFETY: all zero is a valid `rtentry`.
        let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
        route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = socket_address(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        let call = libc::SIOCADDRT;
        // SAFETY: the call takes an `rtentry` and keeps no pointer to it.
        checked(unsafe { libc::ioctl(self.socket.as_fd().as_raw_fd(), call, &raw mut route) })
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks() {
        assert_eq!(netmask(30), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(netmask(0), Ipv4Addr::UNSPECIFIED);
        assert_eq!(netmask(32), Ipv4Addr::BROADCAST);
    }

    #[test]
    fn devices() {
        let dir = crate::testing::TempDir::new();
        for (name, kind, mac) in [
            ("lo", "772", "00:00:00:00:00:00"),
            ("eth1", "1", "02:00:a9:fe:00:15"),
            ("eth0", "1", "52:54:00:00:00:01"),
            ("tunl0", "768", ""),
        ] {
            let device = dir.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("type"), format!("{kind}\n")).unwrap();
            fs::write(device.join("address"), format!("{mac}\n")).unwrap();
        }
        let find = |mac| find_device(dir.path(), mac);
        assert_eq!(find(None).as_deref(), Some("eth0"));
        assert_eq!(find(Some("02:00:A9:fe:00:15")).as_deref(), Some("eth1"));
        assert_eq!(find(Some("02:00:00:00:00:01")), None);
        assert!(Link::new("a-name-that-is-too-long").is_err());
    }
}
