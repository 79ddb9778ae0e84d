// SPDX-License-Identifier: Apache-2.0
//! What `/init` changes in the system around the agent. Only PID 1 may: anywhere else that system
//! is not ours.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

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
}

impl SystemSetup {
    /// Makes the changes. Blocks on the disk.
    ///
    /// Errors: what the disk says. A refused host name is no error.
    pub fn apply(&self) -> io::Result<()> {
        self.write_facts(Path::new(FACTS_DIR))?;
        if let Some(name) = self.hostname.as_deref().filter(|name| !name.is_empty()) {
            let _ = rustix::system::sethostname(name.as_bytes());
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

    fn write_facts(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        fs::write(dir.join(".E2B_SANDBOX"), "true")?;
        if let Some(id) = &self.sandbox_id {
            fs::write(dir.join(".E2B_SANDBOX_ID"), id)?;
        }
        if let Some(id) = &self.template_id {
            fs::write(dir.join(".E2B_TEMPLATE_ID"), id)?;
        }
        Ok(())
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
        };
        setup.write_facts(&dir.path().join("e2b")).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join("e2b").join(name));
        assert_eq!(read(".E2B_SANDBOX").unwrap(), "true");
        assert_eq!(read(".E2B_SANDBOX_ID").unwrap(), "i1");
        assert!(read(".E2B_TEMPLATE_ID").is_err());
    }
}
