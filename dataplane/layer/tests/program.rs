// SPDX-License-Identifier: Apache-2.0
//! The program: compression, digests, exit statuses, packing and copying.

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use sha2::{Digest, Sha256};
use support::{Tar, World, describe, gzip, is_whiteout, list, set_xattr, xattr};

const PROGRAM: &str = env!("CARGO_BIN_EXE_opendsec-layer");

fn run(args: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(PROGRAM)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let data = input.to_vec();
    // A program that has seen enough does not read on.
    let feeder = std::thread::spawn(move || drop(stdin.write_all(&data)));
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    output
}

fn unpack(world: &World, input: &[u8], more: &[&str]) -> Output {
    let root = world.root();
    run(
        &[&["unpack", "--into", root.to_str().unwrap()], more].concat(),
        input,
    )
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn report(output: &Output) -> Value {
    assert_eq!(code(output), 0, "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn digest(data: &[u8]) -> String {
    Sha256::digest(data)
        .iter()
        .fold("sha256:".to_owned(), |text, byte| {
            format!("{text}{byte:02x}")
        })
}

fn zstd_pack(data: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(data, 3).unwrap()
}

fn sample() -> Vec<u8> {
    let noise: Vec<u8> = (0..1_000_000u32)
        .map(|n| (n.wrapping_mul(n) >> 7) as u8)
        .collect();
    Tar::new()
        .dir("d")
        .file("d/noise", &noise)
        .file("last", b"last")
        .end()
}

#[test]
fn every_compression_and_its_digests() {
    let plain = sample();
    let (one, two) = plain.split_at(plain.len() / 3);
    let skippable = [&b"\x50\x2a\x4d\x18\x04\0\0\0note"[..], &zstd_pack(&plain)].concat();
    let forms = [
        plain.clone(),
        gzip(&plain),
        zstd_pack(&plain),
        [gzip(one), gzip(two)].concat(),
        [zstd_pack(one), zstd_pack(two)].concat(),
        skippable,
    ];
    for blob in forms {
        let world = World::new();
        let (whole, inner) = (digest(&blob), digest(&plain));
        let expect = ["--expect-blob", &whole, "--expect-diff", &inner];
        let said = report(&unpack(&world, &blob, &expect));
        assert_eq!(said["blob"], whole);
        assert_eq!(said["diff"], inner);
        assert_eq!(said["bytes"], plain.len());
        assert_eq!(said["entries"], 3);
        assert_eq!(world.read("last"), "last");
    }
}

#[test]
fn what_is_behind_the_end_counts_for_the_digests() {
    let padded = [sample(), vec![0; 20 * 512]].concat();
    let world = World::new();
    let said = report(&unpack(&world, &gzip(&padded), &[]));
    assert_eq!(said["diff"], digest(&padded));
}

#[test]
fn damaged_blobs() {
    for (packed, name) in [(gzip(&sample()), "gzip"), (zstd_pack(&sample()), "zstd")] {
        for cut in [packed.len() - 1, packed.len() / 2, 20] {
            let output = unpack(&World::new(), &packed[..cut], &[]);
            assert_eq!(code(&output), 3, "{name} cut at {cut}: {output:?}");
            let said: Value = serde_json::from_slice(&output.stderr).unwrap();
            assert!(said["error"].is_string());
        }
        let mut changed = packed.clone();
        let middle = changed.len() / 2;
        changed[middle] ^= 0xff;
        let whole = digest(&packed);
        let output = unpack(&World::new(), &changed, &["--expect-blob", &whole]);
        assert_eq!(code(&output), 4, "{name}: {output:?}");
    }
    let trailing = [gzip(&sample()), b"garbage".to_vec()].concat();
    assert_eq!(code(&unpack(&World::new(), &trailing, &[])), 3);
    let other = digest(b"other");
    for option in ["--expect-blob", "--expect-diff"] {
        let output = unpack(&World::new(), &gzip(&sample()), &[option, &other]);
        assert_eq!(code(&output), 4);
    }
}

#[test]
fn a_bomb_is_stopped_while_it_goes_off() {
    let zeros = gzip(&vec![0; 64 << 20]);
    assert!(zeros.len() < 1 << 20);
    let bomb = {
        let mut tar = support::header(tar::EntryType::Regular, b"zeros", 1 << 40);
        tar.set_cksum();
        [gzip(tar.as_bytes()), zeros.repeat(40)].concat()
    };
    let limit = (128u64 << 20).to_string();
    let world = World::new();
    let output = unpack(&world, &bomb, &["--bytes-max", &limit]);
    assert_eq!(code(&output), 5, "{output:?}");
    // A claim alone is stopped as well: the length of the file is told beforehand.
    assert!(!world.at("zeros").exists());
    let output = unpack(&World::new(), &sample(), &["--entries-max", "2"]);
    assert_eq!(code(&output), 5);
}

#[test]
fn a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("blob");
    fs::write(&blob, gzip(&sample())).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=256k tmpfs /mnt && exec {PROGRAM} unpack --into /mnt --blob {}",
        blob.display()
    );
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &script])
        .output()
        .unwrap();
    assert_eq!(code(&output), 6, "{output:?}");
}

#[test]
fn what_is_not_there() {
    let output = run(&["unpack", "--into", "/nowhere/at/all"], b"");
    assert_eq!(code(&output), 1);
    let said: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(said["error"].as_str().unwrap().contains("/nowhere/at/all"));
    assert_eq!(
        code(&unpack(&World::new(), b"", &["--blob", "/nowhere"])),
        1
    );
}

/// What the upper directory of an overlay may hold.
fn fill_upper(upper: &Path) {
    let at = |path: &str| upper.join(path);
    fs::create_dir_all(at("dir/deep")).unwrap();
    fs::write(at("dir/deep/file"), "content").unwrap();
    fs::hard_link(at("dir/deep/file"), at("other-name")).unwrap();
    fs::write(at("dir").join("n".repeat(255)), "long").unwrap();
    symlink("/etc/shadow", at("link")).unwrap();
    symlink("t".repeat(300), at("long-link")).unwrap();
    let device = |path: &str, sort, number| {
        mknodat(CWD, at(path), sort, Mode::RUSR, number).unwrap();
    };
    device("dir/gone", FileType::CharacterDevice, 0);
    device("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    device("pipe", FileType::Fifo, 0);
    set_xattr(&at("dir/deep"), "trusted.overlay.opaque", b"y");
    set_xattr(&at("dir/deep/file"), "user.note", b"a\nb");
    std::os::unix::fs::chown(at("dir"), Some(1000), Some(1000)).unwrap();
    let time = fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000));
    for path in ["dir/deep/file", "dir/deep", "dir"] {
        fs::File::open(at(path)).unwrap().set_times(time).unwrap();
    }
}

/// Without times, where they are of no concern or not kept.
fn timeless(lines: Vec<String>) -> Vec<String> {
    let cut = |line: String| {
        let mut fields: Vec<_> = line.splitn(5, ' ').map(str::to_owned).collect();
        fields.remove(3);
        fields.join(" ")
    };
    lines.into_iter().map(cut).collect()
}

fn copy(from: &Path, into: &Path, more: &[&str]) -> Output {
    let (from, into) = (from.to_str().unwrap(), into.to_str().unwrap());
    run(
        &[&["copy-upper", "--from", from, "--into", into], more].concat(),
        b"",
    )
}

#[test]
fn an_upper_directory_is_copied() {
    let (upper, lower) = (World::new(), World::new());
    fill_upper(&upper.root());
    report(&copy(&upper.root(), &lower.root(), &[]));
    let times = |world: &World| {
        let described = describe(&world.root());
        described[1..].to_vec()
    };
    assert_eq!(times(&upper), times(&lower));
    // What overlayfs notes for itself, and what means nothing elsewhere, stays behind.
    set_xattr(&upper.at("dir"), "trusted.overlay.origin", b"\x01\x02");
    set_xattr(&upper.at("dir"), "trusted.overlay.impure", b"y");
    let _socket = UnixListener::bind(upper.at("socket")).unwrap();
    let again = World::new();
    report(&copy(&upper.root(), &again.root(), &[]));
    assert_eq!(
        timeless(describe(&again.root())),
        timeless(describe(&lower.root()))
    );
}

#[test]
fn a_hostile_upper_directory() {
    let upper = World::new();
    let huge = fs::File::create(upper.at("huge")).unwrap();
    huge.set_len(1 << 40).unwrap();
    huge.write_all_at(b"end", (1 << 40) - 3).unwrap();
    symlink(upper.outside(), upper.at("escape")).unwrap();
    symlink("escape", upper.at("loop")).unwrap();
    let lower = World::new();
    report(&copy(&upper.root(), &lower.root(), &[]));
    let have = fs::metadata(lower.at("huge")).unwrap();
    assert_eq!(have.len(), 1 << 40);
    assert!(have.blocks() < 1000);
    assert!(lower.at("escape").is_symlink() && lower.at("loop").is_symlink());
    let bounded = copy(
        &upper.root(),
        &World::new().root(),
        &["--bytes-max", "1000000"],
    );
    assert_eq!(code(&bounded), 5);
    let bounded = copy(&upper.root(), &World::new().root(), &["--entries-max", "2"]);
    assert_eq!(code(&bounded), 5);
    for mark in ["redirect", "metacopy"] {
        let upper = World::new();
        fs::create_dir(upper.at("moved")).unwrap();
        set_xattr(
            &upper.at("moved"),
            &format!("trusted.overlay.{mark}"),
            b"/elsewhere",
        );
        let output = copy(&upper.root(), &World::new().root(), &[]);
        assert_eq!(code(&output), 3, "{output:?}");
        let said: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(said["entry"], "moved");
        assert!(said["error"].as_str().unwrap().contains(mark));
    }
}

#[test]
fn a_very_deep_upper_directory() {
    let upper = World::new();
    let deep = "d/".repeat(opendsec_layer::DEPTH_MAX);
    fs::create_dir_all(upper.at(&deep)).unwrap();
    let lower = World::new();
    report(&copy(&upper.root(), &lower.root(), &[]));
    assert!(lower.at(&deep).is_dir());
    fs::create_dir_all(upper.at(&format!("{deep}/deeper"))).unwrap();
    let output = copy(&upper.root(), &World::new().root(), &[]);
    assert_eq!(code(&output), 3, "{output:?}");
}

#[test]
fn some_of_it_is_left_out() {
    let (upper, lower) = (World::new(), World::new());
    fill_upper(&upper.root());
    let exclude = ["--exclude", "/dir", "--exclude", "*link*"];
    report(&copy(&upper.root(), &lower.root(), &exclude));
    assert_eq!(list(&lower.root()), ["null", "other-name", "pipe"]);
    assert_eq!(fs::metadata(lower.at("other-name")).unwrap().nlink(), 1);
    assert_eq!(
        code(&copy(&upper.root(), &lower.root(), &["--exclude", "a["])),
        1
    );
}

#[test]
fn what_is_scrubbed_stays_deleted() {
    let (upper, lower) = (World::new(), World::new());
    fs::create_dir(upper.at("root")).unwrap();
    fs::write(upper.at("root/.history"), "secret").unwrap();
    fs::write(upper.at("root/kept"), "").unwrap();
    for gone in ["root/.token", "root/.history-of-old", "run"] {
        let device = FileType::CharacterDevice;
        mknodat(CWD, upper.at(gone), device, Mode::empty(), 0).unwrap();
    }
    let patterns = [
        "--exclude",
        "run",
        "--scrub",
        "**/.history*",
        "--scrub",
        "**/.token",
    ];
    report(&copy(&upper.root(), &lower.root(), &patterns));
    assert_eq!(list(&lower.root()), ["root"]);
    assert_eq!(
        list(&lower.at("root")),
        [".history-of-old", ".token", "kept"]
    );
    assert!(is_whiteout(&lower.at("root/.token")));
    assert!(is_whiteout(&lower.at("root/.history-of-old")));
}

#[test]
fn packing_is_the_inverse_of_unpacking() {
    let upper = World::new();
    fill_upper(&upper.root());
    let from = upper.root();
    let from = ["pack", "--from", from.to_str().unwrap()];
    let mut diffs = Vec::new();
    for form in [&[][..], &["--gzip"], &["--zstd"]] {
        let packed = run(&[&from[..], form].concat(), b"");
        assert_eq!(code(&packed), 0, "{packed:?}");
        let again = run(&[&from[..], form].concat(), b"");
        assert!(
            packed.stdout == again.stdout,
            "{form:?}: not the same twice"
        );
        let said: Value = serde_json::from_slice(&packed.stderr).unwrap();
        assert_eq!(said["blob"], digest(&packed.stdout));
        let lower = World::new();
        let read = report(&unpack(&lower, &packed.stdout, &[]));
        assert_eq!(read["diff"], said["diff"]);
        assert_eq!(read["bytes"], said["bytes"]);
        diffs.push(said["diff"].clone());
        let whole = |world: &World| timeless(describe(&world.root()));
        let (mut have, mut wanted) = (whole(&lower), whole(&upper));
        // The mode of a whiteout means nothing.
        for lines in [&mut have, &mut wanted] {
            lines.retain(|line| !line.starts_with("dir/gone "));
        }
        assert_eq!(have, wanted);
        assert!(is_whiteout(&lower.at("dir/gone")));
        assert!(xattr(&lower.at("dir/deep"), "trusted.overlay.opaque").is_some());
    }
    assert!(diffs.iter().all(|diff| *diff == diffs[0]));
    let plain = run(&from, b"");
    let listed = Command::new("tar")
        .arg("-tf")
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut listed = listed.unwrap();
    listed
        .stdin
        .take()
        .unwrap()
        .write_all(&plain.stdout)
        .unwrap();
    let listed = listed.wait_with_output().unwrap();
    let names = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.status.success());
    assert!(names.contains("dir/.wh.gone\n") && names.contains("dir/deep/.wh..wh..opq\n"));
}

#[test]
fn what_cannot_be_packed() {
    let upper = World::new();
    fs::write(upper.at(".wh.trap"), "").unwrap();
    let from = upper.root();
    let output = run(&["pack", "--from", from.to_str().unwrap()], b"");
    assert_eq!(code(&output), 3, "{output:?}");
    // A sparse file would be written out whole.
    let upper = World::new();
    fs::File::create(upper.at("huge"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let from = upper.root();
    let bounded = [
        "pack",
        "--from",
        from.to_str().unwrap(),
        "--bytes-max",
        "1000000",
    ];
    assert_eq!(code(&run(&bounded, b"")), 5);
    let full = Command::new(PROGRAM)
        .args(["pack", "--from", "/etc"])
        .stdout(fs::File::create("/dev/full").unwrap())
        .output()
        .unwrap();
    assert_eq!(code(&full), 6, "{full:?}");
}
