// SPDX-License-Identifier: Apache-2.0
//! The kernel's command line, by which the node tells a virtual machine what it is made of.

use std::io;
use std::net::Ipv4Addr;

/// A parsed command line.
pub struct Cmdline(Vec<String>);

/// The address of the first network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address itself.
    pub ip: Ipv4Addr,
    /// Bits of the network part.
    pub prefix: u32,
}

impl Cmdline {
    /// Reads the running kernel's. `/proc` must be mounted.
    ///
    /// Errors: what reading says.
    pub fn read() -> io::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string("/proc/cmdline")?))
    }

    /// Splits at spaces outside double quotes, as the kernel does.
    pub fn parse(text: &str) -> Self {
        let mut quoted = false;
        let words = text.trim().split(move |c: char| {
            quoted ^= c == '"';
            c.is_whitespace() && !quoted
        });
        let words = words.filter(|word| !word.is_empty());
        Self(words.map(|word| word.replace('"', "")).collect())
    }

    /// The value of a parameter; the last one counts.
    pub fn get(&self, name: &str) -> Option<&str> {
        let words = self.0.iter().rev();
        words
            .filter_map(|word| word.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }

    /// A parameter that is a list with commas; empty if it is not there.
    pub fn list(&self, name: &str) -> Vec<&str> {
        let text = self.get(name).unwrap_or_default();
        text.split(',').filter(|item| !item.is_empty()).collect()
    }

    /// What the command line says for a module: `device=…` for `virtio_mmio.device=…`. A program
    /// that loads modules must hand it on, the kernel only does so for what is built in.
    pub fn module_parameters(&self, module: &str) -> String {
        let own = |word: &&String| {
            let name = word.split(['.', '=']).next().unwrap_or_default();
            word[name.len()..].starts_with('.') && name.replace('-', "_") == module
        };
        let found: Vec<&str> = self
            .0
            .iter()
            .filter(own)
            .map(|word| &word[module.len() + 1..])
            .collect();
        found.join(" ")
    }

    /// `opendsec.ip`: address and prefix.
    ///
    /// Errors: a message if it is malformed.
    pub fn address(&self) -> Result<Option<Address>, String> {
        let Some(text) = self.get("opendsec.ip") else {
            return Ok(None);
        };
        let parsed = text.split_once('/').and_then(|(ip, prefix)| {
            let prefix = prefix.parse().ok().filter(|bits| *bits <= 32)?;
            let ip = ip.parse().ok()?;
            Some(Address { ip, prefix })
        });
        let malformed = || format!("opendsec.ip={text} is no address with prefix");
        parsed.map(Some).ok_or_else(malformed)
    }

    /// A parameter that is a number.
    ///
    /// Errors: a message if it is malformed.
    pub fn number(&self, name: &str) -> Result<Option<usize>, String> {
        let parse = |text: &str| {
            text.parse()
                .map_err(|_| format!("{name}={text} is no number"))
        };
        self.get(name).map(parse).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters() {
        let line = Cmdline::parse(
            "console=ttyS0 quiet opendsec.layers=2 opendsec.ip=169.254.0.21/30 a=\"b c\" \
             virtio_mmio.device=512@0xfeb00000:5 virtio-mmio.device=512@0xfeb00200:6 \
             virtio_mmio_x.y=1 opendsec.dns=1.1.1.1,,2.2.2.2 console=hvc0\n",
        );
        assert_eq!(line.get("console"), Some("hvc0"));
        assert_eq!(line.get("quiet"), None);
        assert_eq!(line.get("a"), Some("b c"));
        assert_eq!(line.number("opendsec.layers"), Ok(Some(2)));
        assert_eq!(line.number("opendsec.none"), Ok(None));
        assert!(line.number("console").is_err());
        assert_eq!(line.list("opendsec.dns"), ["1.1.1.1", "2.2.2.2"]);
        assert_eq!(
            line.module_parameters("virtio_mmio"),
            "device=512@0xfeb00000:5 device=512@0xfeb00200:6"
        );
        assert_eq!(line.module_parameters("virtio"), "");
        let address = line.address().unwrap().unwrap();
        assert_eq!(
            (address.ip, address.prefix),
            (Ipv4Addr::new(169, 254, 0, 21), 30)
        );
        for bad in ["1.2.3.4", "1.2.3.4/33", "x/8"] {
            let line = Cmdline::parse(&format!("opendsec.ip={bad}"));
            assert!(line.address().is_err(), "{bad}");
        }
    }
}
