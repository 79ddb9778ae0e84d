# SPDX-License-Identifier: AGPL-3.0-only
"""Boots an emulated host with systemd and a working ``/dev/kvm``, and runs one command in it.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lab.image import (
    ENDS_WITH_US,
    REPOSITORY,
    VENV,
    Image,
    ImageError,
    ensure_image,
    missing_programs,
)

QEMU = "qemu-system-x86_64"
BOOT_TIMEOUT_S = 240.0
BOOT_TRIES = 2
"""Emulated guests with nested virtualisation now and then end by themselves while they boot."""
POLL_S = 0.2
EXIT_TIME_UP = 124
EXIT_NO_BOOT = 125
EXIT_SKIPPED = 77
CONSOLE_TAIL = 4_000
IMAGES = Path("/var/tmp/opendsec-test-images")
OUR_PROGRAMS = {
    "opendsec-agent": "OPENDSEC_AGENT",
    "opendsec-edge": "OPENDSEC_EDGE",
    "opendsec-ram": "OPENDSEC_RAM",
}
VMM_PROGRAMS = {"firecracker": "OPENDSEC_FIRECRACKER", "jailer": "OPENDSEC_JAILER"}

JOB = """\
#!/bin/bash
# Written by tests/lab/kvm.py; run by the lab's systemd service.
touch /lab/booted
ip link set lo up
ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && ip route add default via 10.0.2.2
stty -F /dev/ttyS1 raw -echo
modprobe -q kvm_amd || modprobe -q kvm_intel
[ -c /dev/kvm ] || echo "lab: NO /dev/kvm, nested virtualisation does not work" >/dev/ttyS1
( mkdir -p {clone} && tar -C {clone} -xf /lab/clone.tar && ln -s {venv} {clone}/.venv ) \
  >/dev/ttyS1 2>&1
cp /lab/bin/* {venv}/bin/ 2>/dev/null
if [ -e /lab/with-images ]; then
  mkdir -p /mnt/images {images}
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,ro images /mnt/images
  for entry in /mnt/images/*; do
    case $entry in */cloud-*) ;; *) cp -a "$entry" {images}/ ;; esac
  done
  umount /mnt/images
fi
export CI=1 PYTHONDONTWRITEBYTECODE=1 {environment}
cd {folder}
if [ -e /lab/with-images ]; then python -m tests.lab.adopt_images {images} >/dev/ttyS1 2>&1; fi
( {command} ) </dev/null >/dev/ttyS1 2>&1
echo $? >/lab/status.new
mv /lab/status.new /lab/status
"""


@dataclass(frozen=True, slots=True)
class Options:
    """How to run.

    Attributes:
        memory_mb: RAM of the emulated host.
        cpus: Its processors.
        timeout_s: Bound on the command, in seconds; booting has its own.
        out: Directory that gets what the command left in ``/lab/out``; None: nothing is kept.
        environment: Variables for the command.
        images: Whether to copy this machine's cache of test images into the host.
    """

    memory_mb: int
    cpus: int
    timeout_s: float
    out: Path | None
    environment: dict[str, str]
    images: bool


def say(text: str) -> None:
    """One line of progress, apart from the command's own output."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def run_in_lab(command: list[str], image: Image, options: Options) -> int:
    """Boot, run, power off; prints the command's output as it comes.

    Returns:
        The command's exit status; ``EXIT_TIME_UP`` when it took too long, ``EXIT_NO_BOOT`` when
        the host did not boot in ``BOOT_TRIES`` tries.
    """
    for attempt in range(1, BOOT_TRIES + 1):
        with tempfile.TemporaryDirectory(prefix="opendsec-lab-", dir="/var/tmp") as scratch:
            lab = Path(scratch)
            _prepare(lab, command, options)
            status = _run_once(lab, image, options)
            if options.out is not None:
                shutil.copytree(lab / "out", options.out, dirs_exist_ok=True)
            if status is not None:
                return status
            console = (lab / "console.log").read_text(errors="replace")[-CONSOLE_TAIL:]
            say(f"the host did not boot (try {attempt} of {BOOT_TRIES}); its console's end:")
            print(console, file=sys.stderr, flush=True)
    return EXIT_NO_BOOT


def _prepare(lab: Path, command: list[str], options: Options) -> None:
    programs = lab / "bin"
    programs.mkdir()
    (lab / "out").mkdir()
    _pack_clone(lab / "clone.tar")
    # A guest in an emulated host is slow, but it is not the kind of slow that means a hang.
    environment = {
        "OPENDSEC_KVM_PROBE_TIMEOUT_S": "180",
        "OPENDSEC_TEST_TIME_FACTOR": "10",
        **options.environment,
    }
    for name, variable in OUR_PROGRAMS.items():
        found = _our_program(name)
        if found is None:
            say(f"{name} is not built: what needs it will be skipped or fail")
        else:
            shutil.copy(found, programs / name)
            environment.setdefault(variable, f"{VENV}/bin/{name}")
    for name, variable in VMM_PROGRAMS.items():
        found = _vmm_program(name, variable)
        if found is None:
            say(f"{name} is missing: set {variable}, or put it in PATH. ITS TESTS ARE SKIPPED")
        else:
            shutil.copy(found, programs / name)
            environment.setdefault(variable, f"{VENV}/bin/{name}")
    if options.images and IMAGES.is_dir():
        (lab / "with-images").touch()
    (lab / "job.sh").write_text(
        JOB.format(
            clone=shlex.quote(str(REPOSITORY)),
            folder=shlex.quote(str(REPOSITORY)),
            venv=VENV,
            images=shlex.quote(str(IMAGES)),
            environment=" ".join(f"{k}={shlex.quote(v)}" for k, v in environment.items()),
            command=shlex.join(command),
        )
    )


def _pack_clone(target: Path) -> None:
    """The clone as it is now: edits during a run do not reach into it, and reading it over the
    shared folder would be slow."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    there = [name for name in names if name and (REPOSITORY / os.fsdecode(name)).exists()]
    subprocess.run(
        ["tar", "-C", str(REPOSITORY), "-cf", str(target), "--null", "-T", "-"],
        input=b"\0".join(there),
        check=True,
    )


def _our_program(name: str) -> Path | None:
    """The newest that was built here, whatever the profile."""
    patterns = ("dataplane/target/*/*/", "dataplane/target/*/", ".venv/bin/")
    found = [path for pattern in patterns for path in REPOSITORY.glob(f"{pattern}{name}")]
    files = [path for path in found if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime) if files else None


def _vmm_program(name: str, variable: str) -> Path | None:
    named = os.environ.get(variable) or shutil.which(name)
    return Path(named) if named and Path(named).is_file() else None


def _qemu_argv(lab: Path, image: Image, options: Options) -> list[str]:
    argv = [
        *ENDS_WITH_US,
        *(QEMU, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,+svm,+npt"),
        *("-smp", str(options.cpus), "-m", str(options.memory_mb)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        "-append",
        "root=/dev/vda rw console=ttyS0 quiet panic=-1 net.ifnames=0 systemd.show_status=0",
        *("-chardev", f"file,id=console,path={lab}/console.log", "-serial", "chardev:console"),
        *("-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out"),
        *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"),
        *("-drive", f"file={image.disk},if=virtio,format=raw,cache=unsafe,snapshot=on"),
        *("-device", "virtio-rng-pci"),
        *_share("lab", lab, readonly=False),
    ]
    if (lab / "with-images").exists():
        argv += _share("images", IMAGES, readonly=True)
    return argv


def _share(tag: str, path: Path, *, readonly: bool) -> list[str]:
    mode = ",readonly=on" if readonly else ""
    return [
        "-fsdev",
        f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}",
        "-device",
        f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
    ]


def _run_once(lab: Path, image: Image, options: Options) -> int | None:
    """One boot. None: it did not come up."""
    started = time.monotonic()
    environment = {**os.environ, "TMPDIR": "/var/tmp"}
    qemu = subprocess.Popen(
        _qemu_argv(lab, image, options), stdin=subprocess.DEVNULL, env=environment
    )
    try:
        while not (lab / "booted").exists():
            if qemu.poll() is not None or time.monotonic() - started > BOOT_TIMEOUT_S:
                return None
            time.sleep(POLL_S)
        booted = time.monotonic()
        say(f"booted after {booted - started:.1f} s")
        try:
            qemu.wait(timeout=options.timeout_s)
        except subprocess.TimeoutExpired:
            say(f"the command's time was up ({options.timeout_s:.0f} s)")
            return EXIT_TIME_UP
        say(f"ended after {time.monotonic() - booted:.1f} s more")
    finally:
        if qemu.poll() is None:
            qemu.kill()
            qemu.wait()
    try:
        return int((lab / "status").read_text())
    except (OSError, ValueError):
        say("the host ended while the command ran")
        return EXIT_NO_BOOT


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="tests.lab.kvm",
        description="Run a command on an emulated host with systemd, cgroup v2 and KVM.",
        epilog=f"Exit status: the command's; {EXIT_TIME_UP}: time up; {EXIT_NO_BOOT}: no boot; "
        f"{EXIT_SKIPPED}: skipped, something is missing on this machine.",
    )
    parser.add_argument("--memory-mb", type=int, default=6_144)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=1_200.0, help="bound on the command")
    parser.add_argument("--out", type=Path, help="folder for what the command leaves in /lab/out")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--images", action="store_true", help="bring the cache of test images")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    missing = missing_programs() + [name for name in (QEMU,) if shutil.which(name) is None]
    if missing:
        say(f"SKIPPED: {', '.join(missing)} missing (apt-get install qemu-system-x86 mmdebstrap)")
        sys.exit(EXIT_SKIPPED)
    if os.geteuid() != 0:
        say("SKIPPED: building and booting the lab needs root")
        sys.exit(EXIT_SKIPPED)
    try:
        image = ensure_image(say)
    except ImageError as exc:
        say(f"SKIPPED: the image could not be built: {exc}")
        sys.exit(EXIT_SKIPPED)
    options = Options(
        memory_mb=arguments.memory_mb,
        cpus=arguments.cpus,
        timeout_s=arguments.timeout_s,
        out=arguments.out,
        environment=dict(item.split("=", 1) for item in arguments.env),
        images=arguments.images,
    )
    sys.exit(run_in_lab(arguments.command, image, options))


if __name__ == "__main__":
    main()
