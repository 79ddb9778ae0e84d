// SPDX-License-Identifier: Apache-2.0
//! `/opendsec/unpack`: archives into a running sandbox.

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::{Command, Stdio};

use support::{Agent, Answer, CONTROL, eventually, exists, read_answer};

/// A tar archive of a tree, by the system's own tar.
fn tar(agent: &Agent, make: impl FnOnce(&std::path::Path), options: &[&str]) -> Vec<u8> {
    let tree = agent.dir.join("to-pack");
    fs::create_dir(&tree).unwrap();
    make(&tree);
    let packed = Command::new("tar")
        .args(options)
        .args(["-c", "-C"])
        .arg(&tree)
        .args(["-f", "-", "."])
        .output()
        .unwrap();
    assert!(packed.status.success(), "{packed:?}");
    fs::remove_dir_all(tree).unwrap();
    packed.stdout
}

fn sample(agent: &Agent) -> Vec<u8> {
    tar(
        agent,
        |tree| {
            fs::create_dir_all(tree.join("app/deep")).unwrap();
            fs::write(tree.join("app/run"), "run").unwrap();
            fs::write(tree.join("app/deep/er"), "deeper").unwrap();
            symlink("/etc", tree.join("app/link")).unwrap();
            fs::write(tree.join("one"), "one").unwrap();
        },
        &[],
    )
}

fn unpack(agent: &Agent, query: &[(&str, &str)], body: &[u8]) -> Answer {
    let query: Vec<String> = query
        .iter()
        .map(|(name, value)| format!("{name}={}", value.replace('/', "%2F")))
        .collect();
    let path = format!("/opendsec/unpack?{}", query.join("&"));
    agent.control("POST", &path, body)
}

fn copy(agent: &Agent, source: &str, target: &str, body: &[u8]) -> Answer {
    unpack(agent, &[("source", source), ("target", target)], body)
}

fn read(agent: &Agent, path: &str) -> String {
    fs::read_to_string(agent.path(path)).unwrap_or_else(|err| panic!("{path}: {err}"))
}

/// No directory was forgotten.
fn names(agent: &Agent, path: &str) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(agent.path(path))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn files_and_directories_go_where_copy_puts_them() {
    let agent = Agent::start();
    let archive = sample(&agent);
    let at = |path: &str| agent.path(path);
    let done = copy(&agent, "one", &at("new/name"), &archive);
    assert_eq!(done.status, 200);
    assert_eq!(done.json(), serde_json::json!({"entries": 1, "bytes": 3}));
    assert_eq!(read(&agent, "new/name"), "one");
    assert_eq!(copy(&agent, "/one", &at("into/"), &archive).status, 200);
    assert_eq!(read(&agent, "into/one"), "one");
    assert_eq!(copy(&agent, "./one", &at("into"), &archive).status, 200);
    assert_eq!(names(&agent, "into"), ["one"]);
    // A directory's content, not itself; what is there stays.
    fs::create_dir_all(at("merged/deep")).unwrap();
    fs::write(at("merged/kept"), "kept").unwrap();
    fs::write(at("merged/run"), "old").unwrap();
    fs::write(at("merged/deep/kept"), "kept").unwrap();
    let done = copy(&agent, "app", &at("merged"), &archive);
    assert_eq!(done.json()["entries"], 5);
    assert_eq!(names(&agent, "merged"), ["deep", "kept", "link", "run"]);
    assert_eq!(names(&agent, "merged/deep"), ["er", "kept"]);
    assert_eq!(read(&agent, "merged/run"), "run");
    assert_eq!(copy(&agent, ".", &at("all/of/it"), &archive).status, 200);
    assert_eq!(names(&agent, "all/of/it"), ["app", "one"]);
    assert_eq!(read(&agent, "all/of/it/app/deep/er"), "deeper");
    assert_eq!(copy(&agent, "app/link", &at("etc"), &archive).status, 200);
    assert_eq!(fs::read_link(at("etc")).unwrap().to_str(), Some("/etc"));
    // Over a link to a directory, as over the directory.
    symlink(at("merged"), at("alias")).unwrap();
    assert_eq!(copy(&agent, "one", &at("alias"), &archive).status, 200);
    assert_eq!(read(&agent, "merged/one"), "one");
    assert_eq!(
        names(&agent, ""),
        ["alias", "all", "etc", "into", "merged", "new"]
    );
}

#[test]
fn many_sources_are_one_call() {
    let agent = Agent::start();
    let at = |path: &str| agent.path(path);
    let archive = tar(
        &agent,
        |tree| {
            fs::create_dir_all(tree.join("src/sub/deep")).unwrap();
            fs::create_dir_all(tree.join("src/other")).unwrap();
            for (path, text) in [
                ("src/a.py", "a"),
                ("src/b.py", "b"),
                ("src/c.txt", "c"),
                ("src/sub/x", "x"),
                ("src/sub/deep/y", "y"),
                ("src/other/z", "z"),
            ] {
                fs::write(tree.join(path), text).unwrap();
            }
            fs::hard_link(tree.join("src/a.py"), tree.join("src/same.py")).unwrap();
        },
        &["--sort=name"],
    );
    // Files into the place, which need not be there; of directories what is in them.
    let done = copy(&agent, "src/*", &at("all"), &archive);
    assert_eq!((done.status, &done.json()["entries"]), (200, &10.into()));
    let expected = ["a.py", "b.py", "c.txt", "deep", "same.py", "x", "z"];
    assert_eq!(names(&agent, "all"), expected);
    assert_eq!(read(&agent, "all/deep/y"), "y");
    let inode = |path: &str| fs::metadata(at(path)).unwrap().ino();
    assert_eq!(inode("all/a.py"), inode("all/same.py"));
    // One match is as if it had been named.
    assert_eq!(copy(&agent, "src/*.txt", &at("one"), &archive).status, 200);
    assert_eq!(read(&agent, "one"), "c");
    // What belongs to several sources is there for each.
    let target = at("more/");
    let query = [
        ("source", "src"),
        ("source", "src/[ab].py"),
        ("source", "src/sub/x"),
        ("target", &target),
        ("mode", "0600"),
    ];
    let done = unpack(&agent, &query, &archive);
    assert_eq!(done.status, 200, "{:?}", done.json());
    assert_eq!(
        names(&agent, "more"),
        ["a.py", "b.py", "c.txt", "other", "same.py", "sub", "x"]
    );
    assert_eq!(
        (read(&agent, "more/sub/x"), read(&agent, "more/x")),
        ("x".into(), "x".into())
    );
    assert_eq!(fs::metadata(at("more/x")).unwrap().mode() & 0o7777, 0o600);
    // All or nothing.
    let target = at("not");
    let query = [("source", "src/*"), ("source", "no/*"), ("target", &target)];
    let refused = unpack(&agent, &query, &archive);
    assert_eq!(refused.status, 400);
    assert!(
        refused.json()["message"]
            .as_str()
            .unwrap()
            .contains("'no/*'")
    );
    assert_eq!(names(&agent, ""), ["all", "more", "one"]);
}

#[test]
fn a_file_and_a_directory_of_one_name_cannot_both_be_there() {
    let agent = Agent::start();
    let archive = tar(
        &agent,
        |tree| {
            fs::create_dir_all(tree.join("a/name")).unwrap();
            fs::create_dir_all(tree.join("b")).unwrap();
            fs::write(tree.join("a/name/in"), "").unwrap();
            fs::write(tree.join("b/name"), "").unwrap();
        },
        &[],
    );
    for wanted in [["a", "b"], ["b", "a"]] {
        let target = agent.path("target/");
        let query = [
            ("source", wanted[0]),
            ("source", wanted[1]),
            ("target", &target),
        ];
        assert_eq!(unpack(&agent, &query, &archive).status, 400, "{wanted:?}");
        fs::remove_dir_all(&target).unwrap();
    }
    assert_eq!(names(&agent, ""), [""; 0]);
}

#[test]
fn every_compression() {
    let agent = Agent::start();
    let plain = sample(&agent);
    let filter = |program: &str| {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let data = plain.clone();
        let feeder = std::thread::spawn(move || stdin.write_all(&data).unwrap());
        let packed = child.wait_with_output().unwrap().stdout;
        feeder.join().unwrap();
        packed
    };
    let (gzip, zstd) = (filter("gzip"), filter("zstd"));
    let skippable = [&b"\x5e\x2a\x4d\x18\x03\0\0\0abc"[..], &zstd].concat();
    for (index, body) in [&plain, &gzip, &zstd, &skippable].into_iter().enumerate() {
        let target = agent.path(&format!("{index}/"));
        assert_eq!(copy(&agent, "one", &target, body).status, 200, "{index}");
        assert_eq!(read(&agent, &format!("{index}/one")), "one");
    }
    for body in [&gzip, &zstd] {
        for cut in [body.len() - 3, body.len() / 2, 5] {
            let answer = copy(&agent, "one", &agent.path("cut/"), &body[..cut]);
            assert_eq!(answer.status, 400);
        }
        let mut wrong = body.clone();
        let middle = wrong.len() / 2;
        wrong[middle] ^= 0x55;
        let answer = copy(&agent, "one", &agent.path("cut/"), &wrong);
        assert_eq!(answer.status, 400);
    }
    assert_eq!(names(&agent, ""), ["0", "1", "2", "3"]);
}

#[test]
fn owners_and_modes() {
    let agent = Agent::start();
    let archive = sample(&agent);
    let target = agent.path("a/b");
    let query = [
        ("source", "app"),
        ("target", &*target),
        ("user", "1234:1235"),
        ("mode", "751"),
    ];
    assert_eq!(unpack(&agent, &query, &archive).status, 200);
    for path in ["a", "a/b", "a/b/run", "a/b/deep", "a/b/link"] {
        let meta = fs::symlink_metadata(agent.path(path)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1234, 1235), "{path}");
        if !meta.is_symlink() && path != "a" {
            assert_eq!(meta.mode() & 0o7777, 0o751, "{path}");
        }
    }
    let target = agent.path("number");
    let query = [("source", "one"), ("target", &*target), ("user", "4321")];
    assert_eq!(unpack(&agent, &query, &archive).status, 200);
    let meta = fs::metadata(&target).unwrap();
    assert_eq!((meta.uid(), meta.gid()), (4321, 4321));
    let target = agent.path("named");
    let query = [
        ("source", "one"),
        ("target", &*target),
        ("user", "nobody:root"),
    ];
    assert_eq!(unpack(&agent, &query, &archive).status, 200);
    let meta = fs::metadata(&target).unwrap();
    assert_eq!((meta.uid(), meta.gid()), (65534, 0));
    let query = [
        ("source", "one"),
        ("target", &*target),
        ("user", "no-such-user"),
    ];
    let answer = unpack(&agent, &query, &archive);
    assert_eq!(answer.status, 400);
    let message = answer.json()["message"].as_str().unwrap().to_owned();
    assert!(
        message.contains("no-such-user") && message.contains("numeric"),
        "{message}"
    );
}

#[test]
fn what_is_refused_changes_nothing() {
    let agent = Agent::start();
    let archive = sample(&agent);
    let at = |path: &str| agent.path(path);
    fs::write(at("file"), "file").unwrap();
    fs::create_dir_all(at("dir/run")).unwrap();
    let before = names(&agent, "");
    let refused = |source: &str, target: &str, body: &[u8], says: &str| {
        let answer = copy(&agent, source, target, body);
        assert_eq!(answer.status, 400, "{source} {target}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(says), "{message}");
        assert_eq!(names(&agent, ""), before);
        assert_eq!(names(&agent, "dir"), ["run"]);
    };
    refused("two", &at("x"), &archive, "no 'two'");
    refused("ap", &at("x"), &archive, "no 'ap'");
    refused("../one", &at("x"), &archive, "..");
    refused("one", "relative", &archive, "absolute");
    refused("one", &at("file/x"), &archive, "no directory");
    refused("app", &at("file"), &archive, "no directory");
    refused("app", &at("dir"), &archive, "a directory");
    refused("app", &at("x"), b"this is not an archive", "breaks off");
    refused("app", &at("x"), &[7; 4096], "no tar archive");
    refused("app", &at("x"), &archive[..archive.len() / 3], "");
    let escape = tar(
        &agent,
        |tree| fs::write(tree.join("f"), "f").unwrap(),
        &["--transform=s,f,../../../escaped,", "-P"],
    );
    refused(".", &at("x"), &escape, "..");
    let query = [("source", "one"), ("target", &*at("x")), ("mode", "9")];
    assert_eq!(unpack(&agent, &query, &archive).status, 400);
    assert_eq!(
        agent
            .control("POST", "/opendsec/unpack?source=a", b"")
            .status,
        400
    );
    assert_eq!(agent.control("GET", "/opendsec/unpack", b"").status, 405);
    let foreign = agent.call(
        "POST",
        "/opendsec/unpack?source=one&target=/tmp/x",
        &[],
        &archive,
    );
    assert_eq!(foreign.status, 401);
}

#[test]
fn a_caller_that_goes_leaves_nothing_and_others_are_served() {
    let agent = Agent::start();
    let archive = sample(&agent);
    let path = format!("/opendsec/unpack?source=.&target={}", agent.path("x"));
    let head = [
        ("X-Opendsec-Control", CONTROL),
        ("Content-Length", "100000000"),
    ];
    // More than are unpacked at once.
    let mut open = Vec::new();
    for _ in 0..5 {
        let mut stream = agent.open("POST", &path, &head);
        stream.write_all(&archive[..1536]).unwrap();
        open.push(stream);
    }
    eventually("unpacking has begun", || !names(&agent, "").is_empty());
    assert_eq!(agent.run("echo served", &[]).stdout, "served\n");
    drop(open);
    eventually("nothing is left", || names(&agent, "").is_empty());
    assert_eq!(copy(&agent, "one", &agent.path("x"), &archive).status, 200);
    // An archive without its end counts only if the body has one.
    let whole = archive.len() - archive.iter().rev().take_while(|byte| **byte == 0).count();
    let whole = whole.next_multiple_of(512);
    assert_eq!(
        copy(&agent, "one", &agent.path("y"), &archive[..whole]).status,
        200
    );
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing() {
    let agent = Agent::start();
    let dir = agent.dir.join("small");
    fs::create_dir(&dir).unwrap();
    let mount = |args: &[&str]| {
        // In the agent's own view and nobody else's: it shares ours, so it goes with the guard.
        assert!(Command::new("mount").args(args).status().unwrap().success());
    };
    mount(&[
        "-t",
        "tmpfs",
        "-o",
        "size=64k",
        "opendsec-test",
        dir.to_str().unwrap(),
    ]);
    struct Mounted(std::path::PathBuf);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let _mounted = Mounted(dir.clone());
    let archive = tar(
        &agent,
        |tree| fs::write(tree.join("big"), vec![7; 1 << 20]).unwrap(),
        &[],
    );
    let answer = copy(&agent, "big", dir.join("big").to_str().unwrap(), &archive);
    assert_eq!(answer.status, 507);
    assert_eq!(names(&agent, "small").len(), 0);
}

#[test]
fn hard_links_sparse_files_and_many_pieces() {
    let agent = Agent::start();
    let archive = tar(
        &agent,
        |tree| {
            fs::create_dir(tree.join("d")).unwrap();
            fs::write(tree.join("d/a"), vec![1; 300_000]).unwrap();
            fs::hard_link(tree.join("d/a"), tree.join("d/b")).unwrap();
            let sparse = fs::File::create(tree.join("d/sparse")).unwrap();
            sparse.set_len(100 << 20).unwrap();
        },
        &["-S", "--format=posix", "--sort=name"],
    );
    assert_eq!(copy(&agent, "d", &agent.path("t"), &archive).status, 200);
    let meta = |path: &str| fs::metadata(agent.path(path)).unwrap();
    assert_eq!(meta("t/a").ino(), meta("t/b").ino());
    assert_eq!(
        (meta("t/sparse").len(), meta("t/sparse").blocks()),
        (100 << 20, 0)
    );
    let answer = copy(&agent, "d/b", &agent.path("b"), &archive);
    assert_eq!(answer.status, 400);
    assert!(!exists(&agent.path("b")));
    // Byte by byte over the wire.
    let path = format!("/opendsec/unpack?source=d/a&target={}", agent.path("slow"));
    let head = [
        ("X-Opendsec-Control", CONTROL),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
    ];
    let mut stream = agent.open("POST", &path, &head);
    for piece in archive.chunks(1000) {
        stream
            .write_all(format!("{:x}\r\n", piece.len()).as_bytes())
            .unwrap();
        stream.write_all(piece).unwrap();
        stream.write_all(b"\r\n").unwrap();
    }
    stream.write_all(b"0\r\n\r\n").unwrap();
    assert_eq!(read_answer(stream).status, 200);
    assert_eq!(meta("slow").len(), 300_000);
}
