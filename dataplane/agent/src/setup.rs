// SPDX-License-Identifier: Apache-2.0
//! What `/init` changes in the system around the agent. Only PID 1 may: anywhere else that system
//! is not ours.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::vm::clock::Timestamp;
use crate::vm::{self, entropy, identity};

/// Says to programs that they run in a sandbox.
pub const ENV_SANDBOX: &str = "E2B_SANDBOX";
/// The sandbox's id.
pub const ENV_SANDBOX_ID: &str = "E2B_SANDBOX_ID";
/// The id of the template that the sandbox was made of.
pub const ENV_TEMPLATE_ID: &str = "E2B_TEMPLATE_ID";

const FACTS_DIR: &str = "/run/e2b";
const CA_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Kept apart too, so that `update-ca-certificates` finds it when it makes the bundle anew.
const CA_EXTRA: &str = "/usr/local/share/ca-certificates/opendsec-ca.crt";

/// Whether the agent itself sets this variable.
pub fn is_own_variable(name: &str) -> bool {
    [ENV_SANDBOX, ENV_SANDBOX_ID, ENV_TEMPLATE_ID].contains(&name)
}

/// The part of an `/init` that concerns the system.
pub struct SystemSetup {
    /// Written to `/run/e2b/.E2B_SANDBOX_ID`.
    pub sandbox_id: Option<String>,
    /// Written to `/run/e2b/.E2B_TEMPLATE_ID`.
    pub template_id: Option<String>,
    /// New host name; a sandbox that may not change it keeps its own.
    pub hostname: Option<String>,
    /// PEM certificates to trust.
    pub ca_bundle: Option<String>,
    /// The time. In a container it is the node's anyway, so it is not looked at there.
    pub timestamp: Option<Timestamp>,
    /// Fresh randomness; not looked at in a container either.
    pub entropy: Option<Vec<u8>>,
    /// New content of `/etc/machine-id`, where there is such a file.
    pub machine_id: Option<String>,
    /// New boot id of a virtual machine.
    pub boot_id: Option<String>,
}

impl SystemSetup {
    /// Makes the changes. Blocks on the disk.
    ///
    /// Errors: what the disk says. A refused host name is no error.
    pub fn apply(&self) -> io::Result<()> {
        // First what must not be wrong for a moment longer than it has to be.
        if let Some(vm) = vm::current() {
            self.renew(vm)?;
        }
        self.write_facts(Path::new(FACTS_DIR))?;
        tell("/tmp", make_tmp(Path::new("/tmp")));
        if let Some(name) = self.hostname.as_deref().filter(|name| !name.is_empty()) {
            let _ = rustix::system::sethostname(name.as_bytes());
            tell("host name", identity::rename_host(Path::new("/etc"), name));
        }
        if let Some(id) = &self.machine_id {
            tell("machine id", identity::set_machine_id(Path::new("/"), id));
        }
        match self
            .ca_bundle
            .as_deref()
            .map(str::trim)
            .filter(|pem| !pem.is_empty())
        {
            Some(pem) => trust(pem, Path::new(CA_BUNDLE), Path::new(CA_EXTRA)),
            None => Ok(()),
        }
    }

    /// What only the init of its own kernel can do.
    fn renew(&self, vm: &vm::Vm) -> io::Result<()> {
        let what =
            |what: &str, err: io::Error| io::Error::new(err.kind(), format!("{what}: {err}"));
        if let Some(entropy) = &self.entropy {
            entropy::add(&vm.random, entropy).map_err(|err| what("entropy", err))?;
        }
        if let Some(timestamp) = self.timestamp {
            timestamp.apply().map_err(|err| what("clock", err))?;
        }
        if let Some(id) = &self.boot_id {
            tell("boot id", vm.boot_id.set(id));
        }
        Ok(())
    }

    fn write_facts(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        write_anew(&dir.join(".E2B_SANDBOX"), "true")?;
        if let Some(id) = &self.sandbox_id {
            write_anew(&dir.join(".E2B_SANDBOX_ID"), id)?;
        }
        if let Some(id) = &self.template_id {
            write_anew(&dir.join(".E2B_TEMPLATE_ID"), id)?;
        }
        Ok(())
    }
}

/// Everybody's directory, which small images lack and most programs need.
pub fn make_tmp(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o1777)),
        Err(err) if err.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(err) => Err(err),
    }
}

/// Writes a new file in the place of whatever is there: opening a FIFO of the sandbox would block.
fn write_anew(path: &Path, text: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(err) if err.kind() != ErrorKind::NotFound => return Err(err),
        _ => {}
    }
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

/// A sandbox whose disk is full, or that has taken its `/proc` apart, still gets its new tokens and
/// its clock: a name that cannot be written is told on the console.
fn tell(what: &str, done: io::Result<()>) {
    if let Err(err) = done {
        eprintln!("opendsec-agent: {what}: {err}");
    }
}

/// Brings everything that is written to the disk. In a container that is its own file system only.
///
/// Errors: what the disk says.
pub fn sync() -> io::Result<()> {
    match vm::current() {
        Some(vm) => vm.sync(),
        None => Ok(rustix::fs::syncfs(std::fs::File::open("/")?)?),
    }
}

/// Adds certificates to the bundle unless it has them.
fn trust(pem: &str, bundle: &Path, extra: &Path) -> io::Result<()> {
    if let Some(dir) = extra.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(extra, format!("{pem}\n"))?;
    fs::set_permissions(extra, Permissions::from_mode(0o644))?;
    let present = match fs::read_to_string(bundle) {
        Ok(present) => present,
        Err(err) if err.kind() == ErrorKind::NotFound => String::new(),
        Err(err) => return Err(err),
    };
    if present.contains(pem) {
        return Ok(());
    }
    if let Some(dir) = bundle.parent() {
        fs::create_dir_all(dir)?;
    }
    let gap = if present.is_empty() || present.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    let mut file = OpenOptions::new().append(true).create(true).open(bundle)?;
    file.write_all(format!("{gap}{pem}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusts_once_and_keeps_what_was_there() {
        let dir = crate::testing::TempDir::new();
        let (bundle, extra) = (
            dir.path().join("certs/ca.crt"),
            dir.path().join("extra/own.crt"),
        );
        trust("PEM-A", &bundle, &extra).unwrap();
        fs::write(&bundle, "PEM-0").unwrap();
        trust("PEM-A", &bundle, &extra).unwrap();
        trust("PEM-A", &bundle, &extra).unwrap();
        assert_eq!(fs::read_to_string(&bundle).unwrap(), "PEM-0\nPEM-A\n");
        assert_eq!(fs::read_to_string(&extra).unwrap(), "PEM-A\n");
    }

    #[test]
    fn writes_the_facts() {
        let dir = crate::testing::TempDir::new();
        let setup = SystemSetup {
            sandbox_id: Some("i1".into()),
            template_id: None,
            hostname: None,
            ca_bundle: None,
            timestamp: None,
            entropy: None,
            machine_id: None,
            boot_id: None,
        };
        setup.write_facts(&dir.path().join("e2b")).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join("e2b").join(name));
        assert_eq!(read(".E2B_SANDBOX").unwrap(), "true");
        assert_eq!(read(".E2B_SANDBOX_ID").unwrap(), "i1");
        assert!(read(".E2B_TEMPLATE_ID").is_err());
    }

    #[test]
    fn temporary_files_are_everybodys() {
        let dir = crate::testing::TempDir::new();
        let path = dir.path().join("tmp");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        make_tmp(&path).unwrap();
        assert_eq!(mode(), 0o1777);
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        make_tmp(&path).unwrap();
        assert_eq!(mode(), 0o700, "one that is there stays as it is");
    }
}
