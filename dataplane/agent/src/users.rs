// SPDX-License-Identifier: Apache-2.0
//! Users and groups, read from `/etc/passwd` and `/etc/group` (passwd(5), group(5)).
//!
//! The binary is static, so there is no NSS. A sandbox may delete or spoil these files: the last
//! good content is kept and used until there is a readable one again.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::limits::USER_FILE_BYTES_MAX;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
const ROOT: &str = "root";
const DEFAULT_SHELL: &str = "/bin/sh";

/// One user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Home directory.
    pub home: String,
    /// Login shell.
    pub shell: String,
    /// All groups, the primary one first.
    pub groups: Vec<u32>,
}

/// What the two files said at one moment.
#[derive(Default)]
pub struct Snapshot {
    users: Vec<User>,
    user_names: HashMap<u32, String>,
    group_names: HashMap<u32, String>,
}

/// What a process runs as, or a file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Snapshot {
    /// The user of `name`, `uid`, `name:group` or `uid:gid`, as the `USER` of an image means it:
    /// a name wins over a number; a number needs no entry in `/etc/passwd`, its group is 0 then;
    /// a given group stands alone. Root exists in every system.
    pub fn user(&self, spec: &str) -> Option<User> {
        let (name, group) = split(spec);
        let mut user = self.entry(name).cloned().or_else(|| {
            if name == ROOT || id(name) == Some(0) {
                return Self::root_only().users.pop();
            }
            Some(User {
                name: name.to_owned(),
                uid: id(name)?,
                gid: 0,
                home: "/".to_owned(),
                shell: DEFAULT_SHELL.to_owned(),
                groups: vec![0],
            })
        })?;
        if let Some(group) = group {
            user.gid = self.group(group)?;
            user.groups = vec![user.gid];
        }
        Some(user)
    }

    /// The owner that `COPY --chown` of a Dockerfile means: as `user`, but the group of a number
    /// that is no user is the same number.
    pub fn owner(&self, spec: &str) -> Option<Owner> {
        let user = self.user(spec)?;
        let (name, group) = split(spec);
        let is_bare_number = group.is_none() && name != ROOT && self.entry(name).is_none();
        Some(Owner {
            uid: user.uid,
            gid: if is_bare_number { user.uid } else { user.gid },
        })
    }

    fn entry(&self, name: &str) -> Option<&User> {
        let named = self.users.iter().find(|user| user.name == name);
        named.or_else(|| {
            let uid = id(name)?;
            self.users.iter().find(|user| user.uid == uid)
        })
    }

    fn group(&self, name: &str) -> Option<u32> {
        let named = self.group_names.iter().find(|(_, known)| *known == name);
        match named {
            Some((gid, _)) => Some(*gid),
            None if name == ROOT => Some(0),
            None => id(name),
        }
    }

    /// The name of a user id, or the number as text.
    pub fn user_name(&self, uid: u32) -> String {
        self.user_names
            .get(&uid)
            .cloned()
            .unwrap_or_else(|| uid.to_string())
    }

    /// The name of a group id, or the number as text.
    pub fn group_name(&self, gid: u32) -> String {
        self.group_names
            .get(&gid)
            .cloned()
            .unwrap_or_else(|| gid.to_string())
    }

    fn parse(passwd: &str, group: &str) -> Self {
        let mut snapshot = Snapshot::default();
        let mut members: HashMap<&str, Vec<u32>> = HashMap::new();
        for line in group.lines() {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, gid, ..] = fields[..] else {
                continue;
            };
            let Ok(gid) = gid.parse::<u32>() else {
                continue;
            };
            snapshot
                .group_names
                .entry(gid)
                .or_insert_with(|| name.to_owned());
            let list = fields.get(3).copied().unwrap_or_default();
            for member in list.split(',').map(str::trim).filter(|m| !m.is_empty()) {
                members.entry(member).or_default().push(gid);
            }
        }
        for line in passwd.lines() {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, uid, gid, _, home, ..] = fields[..] else {
                continue;
            };
            let (Ok(uid), Ok(gid)) = (uid.parse::<u32>(), gid.parse::<u32>()) else {
                continue;
            };
            if name.is_empty() {
                continue;
            }
            let mut groups = vec![gid];
            for extra in members.get(name).into_iter().flatten() {
                if !groups.contains(extra) {
                    groups.push(*extra);
                }
            }
            let or = |text: &str, default: &str| {
                if text.is_empty() {
                    default.to_owned()
                } else {
                    text.to_owned()
                }
            };
            snapshot
                .user_names
                .entry(uid)
                .or_insert_with(|| name.to_owned());
            snapshot.users.push(User {
                name: name.to_owned(),
                uid,
                gid,
                home: or(home, "/"),
                shell: or(fields.get(6).copied().unwrap_or_default(), DEFAULT_SHELL),
                groups,
            });
        }
        snapshot
    }

    /// What is true of every Linux system, for one whose files were never readable.
    fn root_only() -> Self {
        Self::parse("root:x:0:0::/root:/bin/sh", "root:x:0:")
    }
}

fn split(spec: &str) -> (&str, Option<&str>) {
    match spec.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
        None => (spec, None),
    }
}

/// A user or group by its number. The highest one means "nobody" to the kernel.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

/// What to do about a user that a sandbox does not have.
pub fn unknown(spec: &str) -> String {
    format!(
        "'{spec}': the image has no such user or group (/etc/passwd, /etc/group): use root or a \
         numeric id, or make the user in the image"
    )
}

/// The user files, with memory of their last good content.
pub struct UserDb {
    last: Mutex<Arc<Snapshot>>,
}

impl UserDb {
    /// Reads the files for the first time.
    pub fn new() -> Self {
        let db = Self {
            last: Mutex::new(Arc::new(Snapshot::root_only())),
        };
        db.snapshot();
        db
    }

    /// What the files say now, or said when they were last readable. Blocks on the disk.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(passwd) = read_bounded(Path::new(PASSWD)) {
            let group = read_bounded(Path::new(GROUP)).unwrap_or_default();
            let fresh = Snapshot::parse(&passwd, &group);
            if !fresh.users.is_empty() {
                *last = Arc::new(fresh);
            }
        }
        Arc::clone(&last)
    }
}

/// Reads a small regular file. It must not wait on a FIFO that somebody put in its place.
fn read_bounded(path: &Path) -> io::Result<String> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut raw = Vec::new();
    file.take(USER_FILE_BYTES_MAX).read_to_end(&mut raw)?;
    Ok(String::from_utf8_lossy(&raw).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_users_with_their_groups() {
        let snapshot = Snapshot::parse(
            "root:x:0:0:root:/root:/bin/bash\n# note\nuser:x:1000:1000:,,,:/home/user:/bin/bash\nbad:x:y:0::/:\nbare:x:7:7::::\n",
            "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:user\n",
        );
        let user = snapshot.user("user").unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1000));
        assert_eq!(user.groups, vec![1000, 27]);
        assert_eq!(user.home, "/home/user");
        let bare = snapshot.user("bare").unwrap();
        assert_eq!((bare.home.as_str(), bare.shell.as_str()), ("/", "/bin/sh"));
        assert!(snapshot.user("bad").is_none());
        assert_eq!(snapshot.user_name(1000), "user");
        assert_eq!(snapshot.group_name(27), "sudo");
        assert_eq!(snapshot.user_name(4242), "4242");
    }

    #[test]
    fn users_that_an_image_may_name() {
        let snapshot = Snapshot::parse(
            "app:x:101:102::/app:/bin/sh\n7:x:70:71::/seven:\n",
            "app:x:102:\nlog:x:103:app\n",
        );
        let ids = |spec: &str| {
            let user = snapshot.user(spec)?;
            Some((user.uid, user.gid, user.groups))
        };
        assert_eq!(ids("app"), Some((101, 102, vec![102, 103])));
        assert_eq!(ids("101"), Some((101, 102, vec![102, 103])));
        assert_eq!(ids("app:log"), Some((101, 103, vec![103])));
        assert_eq!(ids("app:5"), Some((101, 5, vec![5])));
        assert_eq!(ids("1234"), Some((1234, 0, vec![0])));
        assert_eq!(ids("1234:1235"), Some((1234, 1235, vec![1235])));
        assert_eq!(ids("7"), Some((70, 71, vec![71])));
        assert_eq!(ids("root"), Some((0, 0, vec![0])));
        assert_eq!(ids("0"), Some((0, 0, vec![0])));
        for bad in [
            "user",
            "",
            ":1",
            "app:none",
            "-1",
            "4294967295",
            "99999999999",
            "1.5",
        ] {
            assert_eq!(ids(bad), None, "{bad}");
        }
        let owner = |spec: &str| snapshot.owner(spec).map(|owner| (owner.uid, owner.gid));
        assert_eq!(owner("app"), Some((101, 102)));
        assert_eq!(owner("101"), Some((101, 102)));
        assert_eq!(owner("1234"), Some((1234, 1234)));
        assert_eq!(owner("1234:1"), Some((1234, 1)));
        assert_eq!(owner("root"), Some((0, 0)));
        assert_eq!(owner("user"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_text_is_survived(passwd in "\\PC{0,200}", group in "[a-z:,0-9\n]{0,200}") {
            Snapshot::parse(&passwd, &group);
        }
    }
}
