// SPDX-License-Identifier: Apache-2.0
//! The agent as PID 1 of images that lack almost everything. Needs root and a static busybox.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use support::{ACCESS, CONTROL, Outcome, basic, outcome};

/// An image that runs: its root, and the agent in name spaces of its own.
struct Image {
    agent: support::Agent,
    root: PathBuf,
}

impl Image {
    /// Starts the agent in `root`, with `/proc` and `/dev` as a runtime mounts them.
    fn start(name: &str, fill: impl FnOnce(&Path)) -> Self {
        let root =
            std::env::temp_dir().join(format!("opendsec-bare-{}-{name}", std::process::id()));
        for dir in ["proc", "dev", "run"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        fs::copy(env!("CARGO_BIN_EXE_opendsec-agent"), root.join("agent")).unwrap();
        fill(&root);
        let script = "mount --make-rprivate / && mount -t proc proc \"$0/proc\" && \
                      mount --rbind /dev \"$0/dev\" && \
                      exec env -i $(command -v chroot) \"$0\" /agent --listen 127.0.0.1:0";
        let child = Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--uts",
                "sh",
                "-c",
                script,
            ])
            .arg(&root)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let agent = support::Agent::of_child(child);
        Self { agent, root }
    }

    fn init(&self, more: Value) {
        let mut init = json!({"accessToken": ACCESS, "controlToken": CONTROL, "sandboxId": "i1"});
        init.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let answer = self
            .agent
            .send("POST", "/init", &[], init.to_string().as_bytes());
        assert_eq!(
            answer.status,
            204,
            "{:?}",
            String::from_utf8_lossy(&answer.body)
        );
    }

    fn run(&self, user: &str, cmd: &str, args: &[&str]) -> Outcome {
        let message = json!({"process": {"cmd": cmd, "args": args}, "stdin": false});
        let user = basic(user);
        let headers = [("Authorization", user.as_str())];
        outcome(
            &self
                .agent
                .stream("process.Process/Start", &headers, message),
        )
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.agent.stop();
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn busybox(root: &Path, to: &str) {
    let to = root.join(to);
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    fs::copy("/usr/bin/busybox", to).unwrap();
}

fn message(outcome: &Outcome) -> String {
    outcome.error["message"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn a_scratch_image_with_one_program() {
    let image = Image::start("scratch", |root| busybox(root, "busybox"));
    image.init(json!({"defaultUser": "root"}));
    let said = image.run("root", "/busybox", &["id"]);
    assert!(
        said.stdout.starts_with("uid=0"),
        "{} {}",
        said.stdout,
        said.error
    );
    let said = image.run("root", "/busybox", &["pwd"]);
    assert_eq!(said.stdout, "/\n");
    let said = image.run(
        "1000:1001",
        "/busybox",
        &["sh", "-c", "echo $(/busybox id -u):$(/busybox id -g) $HOME"],
    );
    assert_eq!(said.stdout, "1000:1001 /\n");
    let said = image.run("user", "/busybox", &["id"]);
    assert_eq!(said.error["code"], "unauthenticated");
    let text = message(&said);
    assert!(
        text.contains("'user'") && text.contains("numeric"),
        "{text}"
    );
    for shell in ["/bin/bash", "/bin/sh", "sh"] {
        let said = image.run("root", shell, &["-l", "-c", "echo hi"]);
        assert_eq!(said.error["code"], "invalid_argument", "{shell}");
        assert!(
            message(&said).contains("the image has no shell"),
            "{}",
            message(&said)
        );
    }
    let said = image.run("root", "/none", &[]);
    assert_eq!(said.error["code"], "invalid_argument");
    assert!(!message(&said).contains("shell"));
    // Files, and a place for temporary ones.
    let answer = image.agent.call(
        "POST",
        "/files?path=/home/new/file&username=root",
        &[("Content-Type", "application/octet-stream")],
        b"content",
    );
    assert_eq!(answer.status, 200);
    assert_eq!(
        fs::read(image.root.join("home/new/file")).unwrap(),
        b"content"
    );
    let said = image.run("1000", "/busybox", &["touch", "/tmp/mine"]);
    assert_eq!(said.end["status"], "exit status 0", "{}", said.stderr);
    let answer = image.agent.call("GET", "/files?path=/tmp/mine", &[], b"");
    assert_eq!(answer.status, 200);
    assert_eq!(image.agent.call("GET", "/metrics", &[], b"").status, 200);
    // The agent's own copies of files work without any program of the image.
    let archive = Command::new("tar")
        .args(["-C", "/etc", "-cf", "-", "hostname"])
        .output()
        .unwrap();
    let path = "/opendsec/unpack?source=hostname&target=/srv/app/&user=5:6";
    assert_eq!(
        image.agent.control("POST", path, &archive.stdout).status,
        200
    );
    assert!(image.root.join("srv/app/hostname").is_file());
    let path = "/opendsec/unpack?source=hostname&target=/srv/app/&user=user";
    assert_eq!(
        image.agent.control("POST", path, &archive.stdout).status,
        400
    );
}

#[test]
fn an_image_with_sh_alone() {
    let image = Image::start("busybox", |root| {
        busybox(root, "bin/busybox");
        for name in ["sh", "id", "cat"] {
            symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        fs::create_dir(root.join("etc")).unwrap();
        fs::write(root.join("etc/passwd"), "app:x:101:102::/app:/bin/sh\n").unwrap();
    });
    image.init(json!({"defaultUser": "app"}));
    let said = image.run("app", "/bin/bash", &["-l", "-c", "echo $0; id -u; exit 3"]);
    assert_eq!(said.stdout, "/bin/sh\n101\n");
    assert_eq!(said.end["exitCode"], 3);
    // The file does not name root, who is there anyway.
    assert_eq!(image.run("root", "id", &["-u"]).stdout, "0\n");
    let said = image.run("app", "/bin/bash", &["script.sh"]);
    assert!(message(&said).contains("no bash"), "{}", message(&said));
    // A terminal, as clients open it.
    let start = json!({
        "process": {"cmd": "/bin/bash", "args": ["-i", "-l"]},
        "pty": {"size": {"cols": 80, "rows": 24}}, "tag": "t",
    });
    let user = basic("app");
    let mut stream = image.agent.open_stream(
        "process.Process/Start",
        &[("Authorization", user.as_str())],
        start,
    );
    let (_, first) = stream.next();
    assert!(first["event"]["start"]["pid"].is_u64(), "{first}");
    // One with bash uses it, also if /bin/sh is something else.
    fs::copy("/usr/bin/busybox", image.root.join("bin/bash")).unwrap();
    let said = image.run("app", "/bin/bash", &["-l", "-c", "echo hi"]);
    assert!(
        said.stderr.contains("applet not found"),
        "{} {}",
        said.stdout,
        said.stderr
    );
}

#[test]
fn a_default_directory_that_is_not_there() {
    let image = Image::start("workdir", |root| {
        busybox(root, "busybox");
        fs::create_dir_all(root.join("work")).unwrap();
    });
    image.init(json!({"defaultUser": "0", "defaultWorkdir": "/work"}));
    assert_eq!(image.run("0", "/busybox", &["pwd"]).stdout, "/work\n");
    fs::remove_dir(image.root.join("work")).unwrap();
    assert_eq!(image.run("0", "/busybox", &["pwd"]).stdout, "/\n");
    let message = json!({"process": {"cmd": "/busybox", "args": ["pwd"], "cwd": "/work"}});
    let said = outcome(&image.agent.stream("process.Process/Start", &[], message));
    assert_eq!(said.error["code"], "invalid_argument");
}
