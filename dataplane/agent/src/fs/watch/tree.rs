// SPDX-License-Identifier: Apache-2.0
//! The watched directories of one watch, and the events they give. Blocks on the disk.
//!
//! inotify watches single directories. For a tree, each new directory must be watched as it
//! appears; what was put into it before the watch was there is found by listing it, after the
//! watch is there. So nothing is lost, and what both ways show is told once.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::inotify::{
    CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch,
};
use rustix::io::Errno;

use crate::connect::{Code, RpcError};
use crate::fs::entry::describe;
use crate::limits::{RENAME_PAIR_DELAY, WATCH_DIRS_MAX};
use crate::users::Snapshot;

/// Room for some hundred events of usual length.
const READ_BUFFER_BYTES: usize = 16 * 1024;
/// Events taken at one go, so that a busy tree does not hold a worker for ever.
const BATCH_EVENTS_MAX: usize = 4096;

const INTEREST: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Event types of the protocol.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Create,
    Write,
    Remove,
    Rename,
    Chmod,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Create => "EVENT_TYPE_CREATE",
            Kind::Write => "EVENT_TYPE_WRITE",
            Kind::Remove => "EVENT_TYPE_REMOVE",
            Kind::Rename => "EVENT_TYPE_RENAME",
            Kind::Chmod => "EVENT_TYPE_CHMOD",
        }
    }
}

/// A watched directory.
#[derive(Default)]
struct Dir {
    /// Path below the root; empty for the root itself.
    place: PathBuf,
    /// Names told because they were found by listing: their own creation event may still come.
    listed: HashSet<OsString>,
}

/// A directory that was moved away and did not show up again yet.
struct Departed {
    cookie: u32,
    since: Instant,
    dirs: Vec<(i32, PathBuf)>,
}

/// How a watch is to be made.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory.
    pub root: PathBuf,
    /// Whether directories below it are watched too.
    pub recursive: bool,
    /// Whether events carry the entry.
    pub include_entry: bool,
}

/// A watched tree.
pub struct Tree {
    fd: Arc<OwnedFd>,
    options: Options,
    dirs: HashMap<i32, Dir>,
    departed: Vec<Departed>,
    out: Vec<String>,
    users: Arc<Snapshot>,
}

/// What one look gave.
pub struct Batch {
    /// `FilesystemEvent`s as JSON, in order.
    pub events: Vec<String>,
    /// Whether more may be waiting.
    pub more: bool,
}

impl Tree {
    /// Begins to watch.
    ///
    /// Errors: `resource_exhausted` if the system has no room for more watches.
    pub fn open(options: Options, users: Arc<Snapshot>) -> Result<Self, RpcError> {
        let fd = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(watch_error)?;
        let mut tree = Self {
            fd: Arc::new(fd),
            options,
            dirs: HashMap::new(),
            departed: Vec::new(),
            out: Vec::new(),
            users,
        };
        tree.enter(PathBuf::new(), false)?;
        if tree.dirs.is_empty() {
            let root = tree.options.root.display();
            return Err(RpcError::not_found(format!("path {root} not found")));
        }
        Ok(tree)
    }

    /// What becomes readable when there are events.
    pub fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// Whether `take` must be called again soon, events or not.
    pub fn is_unsettled(&self) -> bool {
        !self.departed.is_empty()
    }

    /// Takes what has happened.
    ///
    /// Errors: `resource_exhausted` if events were lost.
    pub fn take(&mut self, users: Arc<Snapshot>) -> Result<Batch, RpcError> {
        self.users = users;
        let mut buffer = [MaybeUninit::uninit(); READ_BUFFER_BYTES];
        let fd = Arc::clone(&self.fd);
        let mut reader = Reader::new(&*fd, &mut buffer);
        let mut count = 0;
        let more = loop {
            if count >= BATCH_EVENTS_MAX && reader.is_buffer_empty() {
                break true;
            }
            match reader.next() {
                Ok(event) => {
                    count += 1;
                    let name = event
                        .file_name()
                        .map(|name| OsStr::from_bytes(name.to_bytes()));
                    let (wd, flags, cookie) = (event.wd(), event.events(), event.cookie());
                    self.handle(wd, flags, cookie, name)?;
                }
                Err(Errno::AGAIN) => break false,
                Err(Errno::INTR) => {}
                Err(err) => return Err(watch_error(err)),
            }
        };
        self.forget_departed();
        Ok(Batch {
            events: std::mem::take(&mut self.out),
            more,
        })
    }

    fn handle(
        &mut self,
        wd: i32,
        flags: ReadFlags,
        cookie: u32,
        name: Option<&OsStr>,
    ) -> Result<(), RpcError> {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Err(RpcError::exhausted(
                "too many changes at once: events were lost, watch again and list the directory",
            ));
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.dirs.remove(&wd);
            return Ok(());
        }
        let Some(dir) = self.dirs.get_mut(&wd) else {
            return Ok(());
        };
        let Some(name) = name else {
            self.handle_self(wd, flags);
            return Ok(());
        };
        let place = dir.place.join(name);
        if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            if !dir.listed.remove(name) {
                self.tell(&place, Kind::Create);
            }
            self.departed
                .retain(|gone| gone.cookie != cookie || cookie == 0);
            if flags.contains(ReadFlags::ISDIR) && self.options.recursive {
                self.enter(place, true)?;
            }
            return Ok(());
        }
        if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::DELETE) {
            dir.listed.remove(name);
            let moved = flags.contains(ReadFlags::MOVED_FROM);
            if moved && flags.contains(ReadFlags::ISDIR) {
                self.depart(cookie, &place);
            }
            self.tell(&place, if moved { Kind::Rename } else { Kind::Remove });
        } else if flags.contains(ReadFlags::ATTRIB) {
            self.tell(&place, Kind::Chmod);
        } else if flags.contains(ReadFlags::MODIFY) {
            self.tell(&place, Kind::Write);
        }
        Ok(())
    }

    /// Events of a directory about itself. Those below the root are told by their parent.
    fn handle_self(&mut self, wd: i32, flags: ReadFlags) {
        if self
            .dirs
            .get(&wd)
            .is_none_or(|dir| !dir.place.as_os_str().is_empty())
        {
            return;
        }
        let root = PathBuf::new();
        if flags.contains(ReadFlags::DELETE_SELF) {
            self.tell(&root, Kind::Remove);
        } else if flags.contains(ReadFlags::MOVE_SELF) {
            self.tell(&root, Kind::Rename);
        } else if flags.contains(ReadFlags::ATTRIB) {
            self.tell(&root, Kind::Chmod);
        }
    }

    /// Watches a directory and, in a recursive watch, all below it. With `announce`, what is
    /// found there is told as created.
    fn enter(&mut self, place: PathBuf, announce: bool) -> Result<(), RpcError> {
        let mut open = vec![place];
        while let Some(place) = open.pop() {
            let path = self.options.root.join(&place);
            let no_follow = if place.as_os_str().is_empty() {
                WatchFlags::empty()
            } else {
                WatchFlags::DONT_FOLLOW
            };
            let wd = match add_watch(&*self.fd, &path, INTEREST | no_follow) {
                Ok(wd) => wd,
                // It is gone or something else by now; its parent tells that.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => continue,
                Err(err) => return Err(watch_error(err)),
            };
            if self.dirs.contains_key(&wd) {
                self.relocate(wd, place);
                continue;
            }
            if self.dirs.len() >= WATCH_DIRS_MAX {
                return Err(RpcError::exhausted(format!(
                    "more than {WATCH_DIRS_MAX} directories to watch, watch a smaller tree"
                )));
            }
            self.dirs.insert(
                wd,
                Dir {
                    place: place.clone(),
                    listed: HashSet::new(),
                },
            );
            if self.options.recursive {
                self.list(wd, &place, announce, &mut open);
            }
        }
        Ok(())
    }

    fn list(&mut self, wd: i32, place: &Path, announce: bool, open: &mut Vec<PathBuf>) {
        // What cannot be read was removed; that is told by the parent.
        let Ok(entries) = fs::read_dir(self.options.root.join(place)) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let child = place.join(&name);
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            if announce {
                self.tell(&child, Kind::Create);
                if kind.is_file() && entry.metadata().is_ok_and(|meta| meta.len() > 0) {
                    self.tell(&child, Kind::Write);
                }
                if let Some(dir) = self.dirs.get_mut(&wd) {
                    dir.listed.insert(name);
                }
            }
            if kind.is_dir() {
                open.push(child);
            }
        }
    }

    /// A watched directory has a new path, and so have all below it.
    fn relocate(&mut self, wd: i32, place: PathBuf) {
        let Some(old) = self.dirs.get(&wd).map(|dir| dir.place.clone()) else {
            return;
        };
        if old == place {
            return;
        }
        for dir in self.dirs.values_mut() {
            if let Ok(below) = dir.place.strip_prefix(&old) {
                dir.place = if below.as_os_str().is_empty() {
                    place.clone()
                } else {
                    place.join(below)
                };
            }
        }
    }

    fn depart(&mut self, cookie: u32, place: &Path) {
        let below = self
            .dirs
            .iter()
            .filter(|(_, dir)| dir.place.starts_with(place));
        let dirs: Vec<_> = below.map(|(wd, dir)| (*wd, dir.place.clone())).collect();
        if !dirs.is_empty() {
            self.departed.push(Departed {
                cookie,
                since: Instant::now(),
                dirs,
            });
        }
    }

    /// What left the tree is no longer watched.
    fn forget_departed(&mut self) {
        let (gone, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.departed)
            .into_iter()
            .partition(|departed| departed.since.elapsed() >= RENAME_PAIR_DELAY);
        self.departed = rest;
        for (wd, place) in gone.into_iter().flat_map(|departed| departed.dirs) {
            if self.dirs.get(&wd).is_some_and(|dir| dir.place == place) {
                self.dirs.remove(&wd);
                let _ = remove_watch(&*self.fd, wd);
            }
        }
    }

    fn tell(&mut self, place: &Path, kind: Kind) {
        let root = place.as_os_str().is_empty();
        let name = if root {
            ".".into()
        } else {
            place.to_string_lossy()
        };
        let mut event = serde_json::json!({"name": name, "type": kind.name()});
        // What was removed or renamed is not at this path any more; another file may be.
        let lasting = matches!(kind, Kind::Create | Kind::Write | Kind::Chmod);
        if self.options.include_entry && lasting {
            let path = if root {
                self.options.root.clone()
            } else {
                self.options.root.join(place)
            };
            if let Ok(entry) = describe(&path, &path.to_string_lossy(), &self.users) {
                event["entry"] = entry;
            }
        }
        self.out.push(event.to_string());
    }
}

fn watch_error(err: Errno) -> RpcError {
    let message = match err {
        Errno::NOSPC => "the system's limit of watches (fs.inotify.max_user_watches) is reached",
        Errno::MFILE | Errno::NFILE => {
            "the system's limit of watchers (fs.inotify.max_user_instances) or files is reached"
        }
        other => return RpcError::new(Code::Internal, format!("watching failed: {other}")),
    };
    RpcError::exhausted(message)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::testing::TempDir;

    fn watch(dir: &TempDir, recursive: bool) -> Tree {
        let options = Options {
            root: dir.path().to_owned(),
            recursive,
            include_entry: false,
        };
        Tree::open(options, Arc::default()).unwrap()
    }

    /// Events as `NAME kind`, until there are none left.
    fn take(tree: &mut Tree) -> Vec<String> {
        let batch = tree.take(Arc::default()).unwrap();
        assert!(!batch.more);
        let short = |text: &String| {
            let event: serde_json::Value = serde_json::from_str(text).unwrap();
            let kind = event["type"]
                .as_str()
                .unwrap()
                .trim_start_matches("EVENT_TYPE_");
            format!("{} {kind}", event["name"].as_str().unwrap())
        };
        batch.events.iter().map(short).collect()
    }

    #[test]
    fn one_directory() {
        let dir = TempDir::new();
        let mut tree = watch(&dir, false);
        let file = dir.path().join("f");
        fs::write(&file, "x").unwrap();
        fs::rename(&file, dir.path().join("g")).unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/unseen"), "x").unwrap();
        fs::remove_file(dir.path().join("g")).unwrap();
        assert_eq!(
            take(&mut tree),
            [
                "f CREATE", "f WRITE", "f RENAME", "g CREATE", "d CREATE", "g REMOVE"
            ]
        );
    }

    #[test]
    fn new_directories_are_told_whole_and_once() {
        let dir = TempDir::new();
        let mut tree = watch(&dir, true);
        fs::create_dir_all(dir.path().join("a/b/c")).unwrap();
        fs::write(dir.path().join("a/b/c/f"), "x").unwrap();
        let told = take(&mut tree);
        let names: BTreeSet<&str> = told.iter().map(String::as_str).collect();
        assert_eq!(names.len(), told.len());
        for expected in [
            "a CREATE",
            "a/b CREATE",
            "a/b/c CREATE",
            "a/b/c/f CREATE",
            "a/b/c/f WRITE",
        ] {
            assert!(names.contains(expected), "{expected} not in {told:?}");
        }
        fs::write(dir.path().join("a/b/c/g"), "").unwrap();
        assert_eq!(take(&mut tree), ["a/b/c/g CREATE"]);
        fs::remove_file(dir.path().join("a/b/c/f")).unwrap();
        fs::write(dir.path().join("a/b/c/f"), "").unwrap();
        assert_eq!(take(&mut tree), ["a/b/c/f REMOVE", "a/b/c/f CREATE"]);
    }

    #[test]
    fn a_moved_directory_keeps_its_watch_under_its_new_name() {
        let dir = TempDir::new();
        fs::create_dir_all(dir.path().join("a/deep")).unwrap();
        let mut tree = watch(&dir, true);
        fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
        assert_eq!(take(&mut tree), ["a RENAME", "b CREATE"]);
        fs::write(dir.path().join("b/deep/f"), "").unwrap();
        assert_eq!(take(&mut tree), ["b/deep/f CREATE"]);
        assert!(!tree.is_unsettled());
    }

    #[test]
    fn what_leaves_the_tree_is_let_go() {
        let dir = TempDir::new();
        let outside = TempDir::new();
        fs::create_dir_all(dir.path().join("a/deep")).unwrap();
        let mut tree = watch(&dir, true);
        fs::rename(dir.path().join("a"), outside.path().join("a")).unwrap();
        assert_eq!(take(&mut tree), ["a RENAME"]);
        assert!(tree.is_unsettled());
        while tree.is_unsettled() {
            std::thread::sleep(RENAME_PAIR_DELAY);
            assert!(take(&mut tree).is_empty());
        }
        assert_eq!(tree.dirs.len(), 1);
        fs::write(outside.path().join("a/deep/f"), "").unwrap();
        assert!(take(&mut tree).is_empty());
    }

    #[test]
    fn the_root_itself() {
        let dir = TempDir::new();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        let options = Options {
            root: root.clone(),
            recursive: true,
            include_entry: true,
        };
        let mut tree = Tree::open(options.clone(), Arc::default()).unwrap();
        fs::remove_dir(&root).unwrap();
        assert!(take(&mut tree).contains(&". REMOVE".to_owned()));
        assert!(tree.dirs.is_empty());
        assert_eq!(
            Tree::open(options, Arc::default()).err().unwrap().code,
            Code::NotFound
        );
    }
}
