// SPDX-License-Identifier: Apache-2.0
//! The agent as a service of a full virtual machine, which has an init of its own.
//!
//! It looks after clock, entropy and names like the init of a small machine, and leaves mounts and
//! other programs alone. It remembers what the node told it, so that a guest that restarts itself
//! is the same sandbox afterwards. A disk that has become another sandbox's remembers nothing: the
//! machine's serial number, which the node sets to the sandbox's id, is another.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::identity::BootId;
use super::{VM, Vm};

const RUN_DIR: &str = "/run/opendsec-agent";
const MEMORY_DIR: &str = "/var/lib/opendsec-agent";
const MEMORY_FILE: &str = "init.json";
const SERIAL_NUMBER: &str = "/sys/class/dmi/id/product_serial";
/// Largest memory that is read.
const MEMORY_BYTES_MAX: u64 = 1024 * 1024;

/// Takes hold of what a later `/init` changes.
///
/// Errors: a sentence.
pub fn prepare() -> Result<(), String> {
    let what = |path: &'static str| move |err: io::Error| format!("{path}: {err}");
    let made = fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(RUN_DIR);
    made.map_err(what(RUN_DIR))?;
    let hidden = File::open(RUN_DIR).map_err(what(RUN_DIR))?;
    let random = File::options().read(true).write(true).open("/dev/urandom");
    let vm = Vm {
        random: random.map_err(what("/dev/urandom"))?.into(),
        disk: File::open("/").map_err(what("/"))?.into(),
        boot_id: BootId::new(hidden.into()),
        is_service: true,
    };
    let _ = VM.set(vm);
    Ok(())
}

/// What the last `/init` said, if it was for this machine.
pub fn remembered() -> Option<Vec<u8>> {
    let serial = fs::read_to_string(SERIAL_NUMBER).ok()?;
    let path = Path::new(MEMORY_DIR).join(MEMORY_FILE);
    recall(&path, serial.trim())
}

fn recall(path: &Path, serial: &str) -> Option<Vec<u8>> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Owner {
        sandbox_id: String,
    }
    if fs::metadata(path).ok()?.len() > MEMORY_BYTES_MAX {
        return None;
    }
    let body = fs::read(path).ok()?;
    let owner: Owner = serde_json::from_slice(&body).ok()?;
    (!serial.is_empty() && owner.sandbox_id == serial).then_some(body)
}

/// Keeps what an `/init` said for the next start. Blocks on the disk.
///
/// Errors: what the disk says.
pub fn remember(body: &[u8]) -> io::Result<()> {
    keep(Path::new(MEMORY_DIR), body)
}

fn keep(dir: &Path, body: &[u8]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    let half = dir.join(".new");
    let _ = fs::remove_file(&half);
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&half)?;
    file.write_all(body)?;
    file.sync_data()?;
    fs::rename(half, dir.join(MEMORY_FILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_for_the_same_machine_only() {
        let dir = crate::testing::TempDir::new();
        let file = dir.path().join(MEMORY_FILE);
        assert_eq!(recall(&file, "i1"), None);
        let body = br#"{"sandboxId":"i1","controlToken":"t"}"#;
        keep(dir.path(), body).unwrap();
        keep(dir.path(), body).unwrap();
        assert_eq!(recall(&file, "i1").unwrap(), body);
        assert_eq!(recall(&file, "i2"), None);
        assert_eq!(recall(&file, ""), None);
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(&file, "{}").unwrap();
        assert_eq!(recall(&file, "i1"), None);
    }
}
