// SPDX-License-Identifier: Apache-2.0
//! Archives of all sorts, good and hostile, onto a real file system.

mod support;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::process::Command;

use opendsec_layer::archive::Limits;
use opendsec_layer::unpack::Attributes;
use opendsec_layer::{Kind, Options};
use proptest::prelude::*;
use support::{Tar, World, header, is_whiteout, layer, list, put, set_xattr, xattr};
use tar::EntryType;

fn refused(archive: Tar) -> String {
    let world = World::new();
    let outside = world.outside();
    symlink(&outside, world.at("planted")).unwrap();
    let err = world.unpack(&archive.end()).unwrap_err();
    assert_eq!(err.kind, Kind::Invalid, "{err}");
    world.require_intact();
    err.to_string()
}

#[test]
fn files_with_all_that_belongs_to_them() {
    let world = World::new();
    let mut suid = header(EntryType::Regular, b"bin/su", 3);
    suid.set_mode(0o4755);
    suid.set_uid(12);
    suid.set_gid(3_000_000_000);
    suid.set_cksum();
    let mut late = header(EntryType::Directory, b"bin/", 0);
    late.set_mode(0o1770);
    late.set_mtime(7);
    late.set_cksum();
    let capability = b"\x01\0\0\x02\n\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let archive = Tar::new()
        .raw(&late, b"")
        .raw(&suid, b"abc")
        .pax(&[
            ("mtime", b"1234.000000005"),
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.user.note", b"a\nb=c"),
        ])
        .file("bin/ping", b"ping")
        .symlink("bin/link", "/nowhere/at/all")
        .hard_link("bin/ping2", "./bin/ping")
        .hard_link("bin/link2", "bin/link")
        .device("dev/null", 1, 3)
        .entry(EntryType::Fifo, "run/pipe", "", b"")
        .file("implied/by/a/file", b"")
        .end();
    let report = world.unpack(&archive).unwrap();
    assert_eq!(
        (report.entries, report.bytes, report.opaque_root),
        (9, archive.len() as u64, false)
    );
    let meta = |path: &str| fs::symlink_metadata(world.at(path)).unwrap();
    let su = meta("bin/su");
    assert_eq!(su.mode() & 0o7777, 0o4755);
    assert_eq!(
        (su.uid(), su.gid(), su.mtime()),
        (12, 3_000_000_000, 1_000_000_000)
    );
    let bin = meta("bin");
    assert_eq!((bin.mode() & 0o7777, bin.mtime()), (0o1770, 7));
    let ping = meta("bin/ping");
    assert_eq!(
        (ping.mtime(), ping.mtime_nsec(), ping.nlink()),
        (1234, 5, 2)
    );
    assert_eq!(ping.ino(), meta("bin/ping2").ino());
    assert_eq!(
        xattr(&world.at("bin/ping"), "security.capability").as_deref(),
        Some(&capability[..])
    );
    assert_eq!(
        xattr(&world.at("bin/ping"), "user.note").unwrap(),
        b"a\nb=c"
    );
    assert!(meta("bin/link2").is_symlink());
    assert_eq!(meta("dev/null").rdev(), 0x103);
    assert!(meta("run/pipe").file_type().is_fifo());
    for implied in ["implied", "implied/by/a", "run", "dev"] {
        let meta = meta(implied);
        assert_eq!(
            (meta.mode() & 0o7777, meta.mtime()),
            (0o755, 0),
            "{implied}"
        );
    }
}

#[test]
fn the_same_archive_gives_the_same_tree() {
    let archive = Tar::new()
        .file("x/y/z", b"1")
        .file("x/.wh.gone", b"")
        .dir("x/y")
        .end();
    let (one, other) = (World::new(), World::new());
    one.unpack(&archive).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    other.unpack(&archive).unwrap();
    assert_eq!(
        support::describe(&one.root()),
        support::describe(&other.root())
    );
}

#[test]
fn long_names() {
    let world = World::new();
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(255));
    let gnu = |sort, name: &str| {
        let mut record = header(sort, b"././@LongLink", name.len() as u64 + 1);
        record.set_cksum();
        (record, [name.as_bytes(), b"\0"].concat())
    };
    let (name, content) = gnu(EntryType::GNULongName, &long);
    let (link, target) = gnu(EntryType::GNULongLink, &long);
    let archive = Tar::new()
        .raw(&name, &content)
        .file("cut", b"gnu")
        .raw(&link, &target)
        .hard_link("hard", "cut")
        .pax(&[("path", b"pax/\xc3\xbc"), ("linkpath", long.as_bytes())])
        .symlink("cut", "cut")
        .end();
    world.unpack(&archive).unwrap();
    assert_eq!(world.read(&long), "gnu");
    assert_eq!(world.read("hard"), "gnu");
    assert_eq!(
        fs::read_link(world.at("pax/ü")).unwrap().to_str(),
        Some(&*long)
    );
    let too_long = "n".repeat(300);
    let message = refused(
        Tar::new()
            .pax(&[("path", too_long.as_bytes())])
            .file("x", b""),
    );
    assert!(message.contains("300 bytes"), "{message}");
    let deep = "ab/".repeat(2000);
    refused(Tar::new().pax(&[("path", deep.as_bytes())]).file("x", b""));
}

#[test]
fn nothing_gets_out() {
    let world = World::new();
    let outside = world.outside();
    let outside = outside.to_str().unwrap();
    // An absolute name is one below the directory; so is where an absolute link leads.
    let archive = Tar::new()
        .file("/etc/passwd", b"mine")
        .symlink("link", "/etc")
        .file("link/shadow", b"mine too")
        .symlink("up", "../../../../etc")
        .file("up/group", b"and this")
        .symlink("file", &format!("{outside}/secret"))
        .file("file", b"replaced")
        .end();
    world.unpack(&archive).unwrap();
    assert_eq!(list(&world.at("etc")), ["group", "passwd", "shadow"]);
    assert_eq!(world.read("file"), "replaced");
    world.require_intact();

    for name in ["../x", "a/../../x", "/..", "a/.."] {
        refused(Tar::new().file(name, b"x"));
        refused(Tar::new().dir(name));
        refused(Tar::new().file("a", b"").hard_link("b", name));
    }
    let to = |name: &str| Tar::new().symlink("x", outside).file(name, b"x");
    // There is no such directory below the root, and a link to nothing is not filled.
    refused(to("x/secret"));
    refused(to("x/new"));
    refused(to("a").hard_link("b", "x/secret"));
    refused(Tar::new().hard_link("b", &format!("{outside}/secret")));
    refused(Tar::new().file("planted/new", b"x"));
    refused(Tar::new().file("planted/secret", b"x"));
    refused(Tar::new().dir("planted/d"));
    refused(Tar::new().file("planted/.wh.secret", b""));
    refused(Tar::new().file("planted/.wh..wh..opq", b""));
    refused(Tar::new().symlink("loop", "loop").file("loop/x", b""));
    refused(Tar::new().file("f", b"").file("f/x", b""));
    refused(Tar::new().file("", b""));
    refused(Tar::new().dir("d").hard_link("e", "d"));
    refused(Tar::new().pax(&[("path", b"a\0b")]).file("x", b""));
}

#[test]
fn links_do_not_make_paths_of_any_length() {
    let mut archive = Tar::new();
    let step = "d".repeat(250);
    let deep = [&*step; 12].join("/");
    archive = archive.pax(&[("path", deep.as_bytes())]).dir("x");
    for level in 0..8 {
        let from = if level == 0 {
            deep.clone()
        } else {
            format!("l{}/{deep}", level - 1)
        };
        archive = archive
            .pax(&[("linkpath", from.as_bytes())])
            .symlink(&format!("l{level}"), "x")
            .pax(&[("path", format!("l{level}/{deep}").as_bytes())])
            .dir("x");
    }
    refused(archive);
}

#[test]
fn later_entries_win() {
    let world = World::new();
    let archive = Tar::new()
        .file("a/b/c", b"old")
        .file("a", b"file over directory")
        .file("d", b"old")
        .file("d", b"new")
        .file("e", b"")
        .dir("e")
        .file("e/f", b"directory over file")
        .dir("real")
        .symlink("l", "real")
        .dir("l")
        .file("l/x", b"directory over link")
        .dir("kept")
        .file("kept/x", b"x")
        .dir("kept")
        .file("h", b"h")
        .hard_link("h", "h")
        .file("i", b"i")
        .hard_link("i", "h")
        .end();
    world.unpack(&archive).unwrap();
    assert_eq!(world.read("a"), "file over directory");
    assert_eq!(world.read("d"), "new");
    assert_eq!(world.read("e/f"), "directory over file");
    assert_eq!(world.read("l/x"), "directory over link");
    assert!(list(&world.at("real")).is_empty());
    assert_eq!(world.read("kept/x"), "x");
    assert_eq!((world.read("h"), world.read("i")), ("h".into(), "h".into()));
}

#[test]
fn whiteouts_and_opaque_directories() {
    let world = World::new();
    let archive = Tar::new()
        .file("a/.wh.gone", b"")
        .dir("opaque")
        .file("opaque/.wh..wh..opq", b"")
        .file("opaque/new", b"")
        .file("own", b"stays")
        .file(".wh.own", b"")
        .file(".wh.back", b"")
        .file("back", b"is back")
        .file(".wh.emptied", b"")
        .dir("emptied")
        .dir("emptied2")
        .file(".wh.emptied2", b"")
        .file(".wh..wh.plnk", b"")
        .device("char", 0, 0)
        .end();
    let report = world.unpack(&archive).unwrap();
    assert!(!report.opaque_root);
    assert!(is_whiteout(&world.at("a/gone")));
    assert!(is_whiteout(&world.at("char")));
    assert_eq!(list(&world.at("opaque")), ["new"]);
    let opaque = |path: &str| xattr(&world.at(path), "trusted.overlay.opaque");
    assert_eq!(opaque("opaque").as_deref(), Some(&b"y"[..]));
    assert_eq!(opaque("a"), None);
    assert_eq!(
        (world.read("own"), world.read("back")),
        ("stays".into(), "is back".into())
    );
    assert!(opaque("emptied").is_some() && opaque("emptied2").is_some());
    assert!(!world.at(".wh..wh.plnk").exists());

    let report = world.unpack(&Tar::new().file(".wh..wh..opq", b"").end());
    assert!(report.unwrap().opaque_root);
    for name in [".wh.", ".wh..", ".wh..."] {
        refused(Tar::new().file(name, b""));
    }
    // Not a layer: names like others.
    let world = World::new();
    let options = Options {
        is_layer: false,
        ..layer(limits(1 << 20, 10))
    };
    world
        .unpack_with(&Tar::new().file(".wh.x", b"x").end(), options)
        .unwrap();
    assert_eq!(world.read(".wh.x"), "x");
}

#[test]
fn marks_of_overlayfs_are_not_taken() {
    let world = World::new();
    let names = [
        "trusted.overlay.opaque",
        "trusted.overlay.redirect",
        "user.overlay.opaque",
        "security.selinux",
    ];
    let keys = names.map(|name| format!("SCHILY.xattr.{name}"));
    let pairs: Vec<(&str, &[u8])> = keys.iter().map(|key| (&**key, &b"y"[..])).collect();
    world
        .unpack(&Tar::new().pax(&pairs).dir("d").end())
        .unwrap();
    for name in names {
        assert_eq!(xattr(&world.at("d"), name), None, "{name}");
    }
}

fn limits(bytes_max: u64, entries_max: u64) -> Limits {
    Limits {
        bytes_max,
        entries_max,
    }
}

#[test]
fn limits_stop_bombs() {
    let exceeded = |archive: &[u8], limits| {
        let world = World::new();
        let err = world.unpack_with(archive, layer(limits)).unwrap_err();
        assert_eq!(err.kind, Kind::Limit, "{err}");
    };
    let two = Tar::new().file("a", &[1; 600]).file("b", b"").end();
    exceeded(&two, limits(two.len() as u64 - 1, 2));
    exceeded(&two, limits(1 << 20, 1));
    World::new()
        .unpack_with(&two, layer(limits(two.len() as u64, 2)))
        .unwrap();
    // Little data, a long file.
    let sparse = Tar::new()
        .pax(&[
            ("GNU.sparse.map", b"0,1"),
            ("GNU.sparse.size", b"1099511627776"),
        ])
        .file("huge", b"x")
        .end();
    exceeded(&sparse, limits(1 << 20, 10));
    // More records than memory.
    let mut huge = header(EntryType::XHeader, b"pax", 1 << 40);
    huge.set_cksum();
    refused(Tar::new().raw(&huge, b""));
    let mut huge = header(EntryType::GNULongName, b"name", 1 << 40);
    huge.set_cksum();
    refused(Tar::new().raw(&huge, b""));
}

#[test]
fn sparse_files_of_every_form() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let file = fs::File::create(&path).unwrap();
    use std::os::unix::fs::FileExt;
    for piece in 0..40u64 {
        file.write_all_at(&[b'p'; 4096], piece * 1024 * 1024)
            .unwrap();
    }
    file.set_len(50 << 20).unwrap();
    let whole = fs::read(&path).unwrap();
    let forms = [
        vec!["--format=gnu"],
        vec!["--format=posix", "--sparse-version=0.0"],
        vec!["--format=posix", "--sparse-version=0.1"],
        vec!["--format=posix", "--sparse-version=1.0"],
    ];
    for form in forms {
        let made = Command::new("tar")
            .args(["-S", "-c", "-C"])
            .arg(dir.path())
            .args(&form)
            .args(["-f", "-", "file"])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        assert!(made.stdout.len() < 1 << 20);
        let world = World::new();
        world.unpack(&made.stdout).unwrap();
        let have = fs::metadata(world.at("file")).unwrap();
        assert_eq!(have.len(), 50 << 20);
        assert!(have.blocks() * 512 < 1 << 20, "{form:?}: no holes");
        assert!(fs::read(world.at("file")).unwrap() == whole, "{form:?}");
    }
    let bad = |map: &[u8], data: &[u8]| {
        let pairs = [("GNU.sparse.map", map), ("GNU.sparse.size", b"100")];
        refused(Tar::new().pax(&pairs).file("x", data));
    };
    bad(b"0,1,0,1", b"ab");
    bad(b"99,2", b"ab");
    bad(b"0,1", b"ab");
    bad(b"0,1,5", b"a");
    bad(b"18446744073709551615,1", b"a");
}

#[test]
fn archives_that_break_off_or_lie() {
    let archive = Tar::new().dir("d").file("d/f", &[7; 3000]).end();
    let whole = archive.len() - 1024;
    for cut in (1..whole).step_by(97) {
        let at_header = cut == 512;
        let result = World::new().unpack(&archive[..cut]);
        assert_eq!(result.is_err(), !at_header, "{cut}");
    }
    // Some writers leave out the end; an empty archive holds nothing.
    World::new().unpack(&archive[..whole]).unwrap();
    World::new().unpack(b"").unwrap();
    let mut wrong = archive.clone();
    wrong[600] ^= 1;
    assert_eq!(World::new().unpack(&wrong).unwrap_err().kind, Kind::Invalid);
    let message = refused(Tar(vec![b'x'; 512]));
    assert!(message.contains("no tar archive"), "{message}");
    let unknown = header(EntryType::new(b'Q'), b"what", 0);
    refused(Tar::new().raw(&unknown, b""));
    let mut short = header(EntryType::Regular, b"f", 1 << 20);
    short.set_cksum();
    refused(Tar::new().raw(&short, b"only this"));
    let mut nobody = header(EntryType::Regular, b"f", 0);
    put(&mut nobody.as_old_mut().uid, b"zz");
    nobody.set_cksum();
    refused(Tar::new().raw(&nobody, b""));
}

#[test]
fn many_files_in_one_directory() {
    let mut archive = Tar::new().dir("many");
    for number in 0..200_000 {
        archive = archive.file(&format!("many/{number}"), b"");
    }
    let world = World::new();
    world
        .unpack_with(&archive.end(), layer(limits(1 << 30, 200_001)))
        .unwrap();
    assert_eq!(fs::read_dir(world.at("many")).unwrap().count(), 200_000);
    // All of them go when a file takes the directory's name.
    world
        .unpack(&Tar::new().file("many", b"one").end())
        .unwrap();
    assert_eq!(world.read("many"), "one");
}

#[test]
fn owner_and_mode_may_be_given() {
    let world = World::new();
    let options = Options {
        owner: Some((1000, 1001)),
        mode: Some(0o750),
        attributes: Attributes::Lenient,
        ..layer(limits(1 << 20, 10))
    };
    let archive = Tar::new()
        .dir("d")
        .file("d/f", b"")
        .symlink("l", "d/f")
        .end();
    world.unpack_with(&archive, options).unwrap();
    for path in ["d", "d/f", "l"] {
        let meta = fs::symlink_metadata(world.at(path)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1000, 1001), "{path}");
        assert!(meta.is_symlink() || meta.mode() & 0o7777 == 0o750, "{path}");
    }
}

#[test]
fn replaced_trees_may_be_deep() {
    let world = World::new();
    let mut archive = Tar::new();
    let deep = "d/".repeat(opendsec_layer::DEPTH_MAX);
    archive = archive.pax(&[("path", deep.as_bytes())]).dir("x");
    world
        .unpack(&archive.file("d", b"now a file").end())
        .unwrap();
    assert_eq!(world.read("d"), "now a file");
    set_xattr(&world.at("d"), "user.x", b"y");
}

/// One entry, hostile more often than not.
fn any_entry() -> impl Strategy<Value = (u8, String, String)> {
    let part = proptest::sample::select(vec!["a", "b", "c", "..", ".", "planted", ".wh.a", "/"]);
    let path = proptest::collection::vec(part, 1..5).prop_map(|parts| parts.join("/"));
    let sort = proptest::sample::select(b"0125".to_vec());
    (sort, path.clone(), path)
}

proptest! {
    #[test]
    fn no_sequence_of_entries_gets_out(
        entries in proptest::collection::vec(any_entry(), 1..25),
    ) {
        let world = World::new();
        symlink(world.outside(), world.at("planted")).unwrap();
        let outside = world.outside();
        let mut archive = Tar::new().symlink("c", outside.to_str().unwrap());
        for (sort, name, link) in &entries {
            let data: &[u8] = if *sort == b'0' { b"data" } else { b"" };
            archive = archive.entry(EntryType::new(*sort), name, link, data);
        }
        // One at a time, so that an error does not hide what would come after it.
        let mut at = 0;
        while at < archive.0.len() {
            let size = if archive.0[at + 156] == b'0' { 1024 } else { 512 };
            let _ = world.unpack(&archive.0[at..at + size]);
            at += size;
        }
        let _ = world.unpack(&archive.end());
        world.require_intact();
    }

    #[test]
    fn damage_is_survived(at in 0usize..4096, bit in 0u8..8) {
        let world = World::new();
        let mut archive = Tar::new()
            .pax(&[("path", b"x/y"), ("SCHILY.xattr.user.a", b"b")])
            .file("f", &[1; 700])
            .symlink("l", "../../outside")
            .file("l/g", b"g")
            .end();
        let at = at % archive.len();
        archive[at] ^= 1 << bit;
        let _ = world.unpack(&archive);
        world.require_intact();
    }
}
