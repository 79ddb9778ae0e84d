// SPDX-License-Identifier: Apache-2.0
//! Finding the disks of a virtual machine by their names: `layer0`, `layer1`, … (the topmost
//! first), `disk`, `modules`.
//!
//! A virtio disk's name is its serial. Firecracker gives its disks serials of its own making, and
//! virtio-pmem devices have none: for those the command line names the devices in their order,
//! `opendsec.disks=layer0,disk` for `vda`, `vdb`, and `opendsec.pmem=layer0` for `pmem0`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::cmdline::Cmdline;

/// Names of disks and their device files.
#[derive(Default)]
pub struct Disks(HashMap<String, PathBuf>);

impl Disks {
    /// What is there now.
    pub fn look(cmdline: &Cmdline, sys_block: &Path) -> Self {
        let mut found = HashMap::new();
        let mut enter = |name: String, device: &str| {
            found
                .entry(name)
                .or_insert_with(|| Path::new("/dev").join(device));
        };
        let devices = devices(sys_block);
        let ordered = [("opendsec.disks", "vd"), ("opendsec.pmem", "pmem")];
        for (parameter, kind) in ordered {
            for (index, name) in cmdline.list(parameter).iter().enumerate() {
                let device = device_name(kind, index);
                if devices.contains(&device) {
                    enter((*name).to_owned(), &device);
                }
            }
        }
        for device in &devices {
            let serial = fs::read_to_string(sys_block.join(device).join("serial"));
            let serial = serial.unwrap_or_default().trim().to_owned();
            if !serial.is_empty() {
                enter(serial, device);
            }
        }
        Self(found)
    }

    /// The device of a name.
    pub fn get(&self, name: &str) -> Option<&Path> {
        self.0.get(name).map(PathBuf::as_path)
    }

    /// Those of the names that are not there.
    pub fn missing<'a>(&self, names: &'a [String]) -> Vec<&'a str> {
        let missing = names.iter().filter(|name| !self.0.contains_key(*name));
        missing.map(String::as_str).collect()
    }
}

fn devices(sys_block: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(sys_block) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names: Vec<_> = names.flat_map(|name| name.into_string()).collect();
    names.sort();
    names
}

/// `vda`…`vdz`, `vdaa`…; `pmem0`, `pmem1`….
fn device_name(kind: &str, index: usize) -> String {
    if kind == "pmem" {
        return format!("pmem{index}");
    }
    let mut letters = Vec::new();
    let mut rest = index + 1;
    while rest > 0 {
        rest -= 1;
        letters.push(b"abcdefghijklmnopqrstuvwxyz"[rest % 26]);
        rest /= 26;
    }
    letters.reverse();
    format!("{kind}{}", String::from_utf8_lossy(&letters))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        let name = |index| device_name("vd", index);
        assert_eq!((name(0), name(25)), ("vda".into(), "vdz".into()));
        assert_eq!((name(26), name(701)), ("vdaa".into(), "vdzz".into()));
        assert_eq!(name(702), "vdaaa");
        assert_eq!(device_name("pmem", 3), "pmem3");
    }

    #[test]
    fn by_serial_and_by_order() {
        let dir = crate::testing::TempDir::new();
        for (device, serial) in [("vda", "layer0\n"), ("vdb", "disk\n"), ("vdc", "12345\n")] {
            fs::create_dir(dir.path().join(device)).unwrap();
            fs::write(dir.path().join(device).join("serial"), serial).unwrap();
        }
        fs::create_dir(dir.path().join("pmem0")).unwrap();
        let look = |line: &str| Disks::look(&Cmdline::parse(line), dir.path());
        let disks = look("");
        assert_eq!(disks.get("layer0"), Some(Path::new("/dev/vda")));
        assert_eq!(disks.get("disk"), Some(Path::new("/dev/vdb")));
        let wanted = ["layer0".to_owned(), "modules".to_owned()];
        assert_eq!(disks.missing(&wanted), ["modules"]);
        let disks = look("opendsec.disks=a,b,layer0,none opendsec.pmem=layer1");
        assert_eq!(disks.get("layer0"), Some(Path::new("/dev/vdc")));
        assert_eq!(disks.get("layer1"), Some(Path::new("/dev/pmem0")));
        assert_eq!(disks.get("disk"), Some(Path::new("/dev/vdb")));
        assert_eq!(disks.get("none"), None);
    }
}
