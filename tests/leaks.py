# SPDX-License-Identifier: AGPL-3.0-only
"""What a node may leave on a machine, seen from outside: compare before and after.

Looks at the machine, not at the node's own records: processes (VMMs by their command line too),
links (taps too), nftables tables, mounts, control groups, loop devices, network namespaces, files
and sockets, and the forwarding switch.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.config import Config
from opendsec_server.node.paths import NodePaths

GONE_WITHIN_S = 10.0
"""The kernel removes namespaces with their links in the background."""

_OURS = re.compile(
    r"opendsecd|opendsec-edge|opendsec-agent|/\.opendsec/agent|opendsec_server\.|crun .*--root"
)


_VMM = re.compile(r"(^|/)(qemu-system-\S+|firecracker|jailer|swtpm)( |$)")
"""Programs behind virtual machines; whose they are is told by the paths they were given."""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _processes(instance: str | None, roots: tuple[Path, ...]) -> set[str]:
    """Programs of ours by command line, VMMs that were given a path below the roots, and whatever
    lives in a sandbox's control group."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        command = _text(entry / "cmdline").replace("\0", " ").strip()
        groups = re.findall(r":(/opendsec-([a-z0-9]+)(?:/\S*)?)$", _text(entry / "cgroup"), re.M)
        inside = any(instance in (None, name) for _path, name in groups)
        ours = instance is None and _OURS.search(command) and "pytest" not in command
        vmm = any(str(root) in command for root in roots) and _VMM.search(command)
        if inside or ours or vmm:
            stat = _text(entry / "stat").rpartition(")")[2].split()
            if stat and stat[0] not in "ZX":
                found.add(f"process {entry.name} (started {stat[19]}): {command[:120]}")
    return found


def _links(instance: str | None) -> set[str]:
    """Host ends of slots; and, when all is looked at, taps that came out of their namespace."""
    pattern = re.compile(rf"^{instance}-\d+$" if instance else r"^([a-z0-9]{1,5}-|tap)\d+$")
    return {f"link {n}" for n in os.listdir("/sys/class/net") if pattern.match(n)}


def _tables(instance: str | None) -> set[str]:
    output = subprocess.run(
        ["nft", "list", "tables"], capture_output=True, text=True, check=False
    ).stdout
    wanted = f"opendsec_{instance}" if instance else "opendsec_"
    return {f"nft {line}" for line in output.splitlines() if wanted in line}


def _mounts(roots: tuple[Path, ...]) -> set[str]:
    found = set()
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        if roots and not any(point.startswith(str(root)) for root in roots):
            continue
        found.add(f"mount {point} ({right.split()[0]})")
    return found


def _control_groups(instance: str | None) -> set[str]:
    wanted = f"opendsec-{instance or '*'}"
    base = Path("/sys/fs/cgroup")
    tops = [*base.glob(wanted), *base.glob(f"*/{wanted}")]
    found = set()
    for top in tops:
        found.add(f"control group {top}")
        found |= {f"control group {sub}" for sub in top.iterdir() if sub.is_dir()}
    return found


def _loops(roots: tuple[Path, ...]) -> set[str]:
    found = set()
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        file = _text(backing).strip()
        if not roots or any(file.startswith(str(root)) for root in roots):
            found.add(f"loop device {backing.parts[3]} on {file}")
    return found


_SWAP_LABEL_AT = 1052
"""Of a swap header: 1,024 bytes of boot block, three numbers, an id of 16 bytes."""


def _swaps(instance: str | None) -> set[str]:
    """Swap files by name, and zram devices by label, active or not."""
    found = set()
    for line in _text(Path("/proc/swaps")).splitlines()[1:]:
        file = line.split()[0]
        if re.search(rf"/opendsec-{instance or '[a-z0-9]+'}\.swap$", file):
            found.add(f"swap file {file}")
    for device in Path("/dev").glob("zram*"):
        with contextlib.suppress(OSError), device.open("rb") as raw:
            raw.seek(_SWAP_LABEL_AT)
            label = raw.read(16).rstrip(b"\0").decode(errors="replace")
            if label == f"opendsec-{instance}" or (not instance and label.startswith("opendsec-")):
                found.add(f"swap device {device} ({label})")
    return found


def _namespaces() -> set[str]:
    """Network namespaces that some process lives in."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.add(f"network namespace {os.readlink(entry / 'ns/net')}")
    return found


def _files(roots: tuple[Path, ...]) -> set[str]:
    return {f"file {path}" for root in roots if root.exists() for path in root.rglob("*")}


@dataclass(frozen=True)
class Snapshot:
    """One look at the machine.

    Attributes:
        instance: Only this instance's names are looked at; None: every instance's.
        roots: Directories in which no new file may stay.
        seen: What was there, as sentences.
    """

    instance: str | None
    roots: tuple[Path, ...]
    seen: frozenset[str]

    @classmethod
    def take(cls, instance: str | None = None, roots: tuple[Path, ...] = ()) -> Snapshot:
        """Look now. Where other instances run beside the test, name the one that is meant, and
        its directories."""
        seen = (
            _processes(instance, roots)
            | _links(instance)
            | _tables(instance)
            | (_mounts(roots) if roots or instance is None else set())
            | _control_groups(instance)
            | (_loops(roots) if roots or instance is None else set())
            | _files(roots)
            | _swaps(instance)
        )
        if instance is None:
            seen |= _namespaces()
            if not _tables(None):
                forward = _text(Path("/proc/sys/net/ipv4/ip_forward")).strip()
                seen.add(f"net.ipv4.ip_forward = {forward}")
        return cls(instance, roots, frozenset(seen))

    def news(self) -> list[str]:
        """What is there now and was not then."""
        return sorted(Snapshot.take(self.instance, self.roots).seen - self.seen)

    def assert_nothing_new(self, within_s: float = GONE_WITHIN_S) -> None:
        """Wait until nothing is new.

        Raises:
            AssertionError: names everything that is left.
        """
        deadline = time.monotonic() + within_s
        while left := self.news():
            if time.monotonic() > deadline:
                raise AssertionError("left behind:\n  " + "\n  ".join(left))
            time.sleep(0.05)


def remains_of_sandboxes(config: Config, *, mapped_too: bool) -> list[str]:
    """What an instance without any sandbox or snapshot must not have, as sentences.

    Slots, templates and images are kept for the next sandbox; these are not looked at. Memory of
    deleted snapshots that machines mapped goes with the housekeeping, or at the next start.

    Args:
        config: Whose.
        mapped_too: Whether such memory must be gone, too.
    """
    paths = NodePaths.of(config)
    found = []
    for folder in (paths.disks, paths.snapshots, paths.bundles, paths.machine_runs):
        for path in folder.iterdir() if folder.is_dir() else ():
            waits = folder == paths.snapshots and [p.name for p in path.glob("*")] == ["memory"]
            if mapped_too or not waits:
                found.append(f"file {path}")
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        point = line.split()[4]
        if any(point.startswith(f"{folder}/") for folder in (paths.bundles, paths.machine_runs)):
            found.append(f"mount {point}")
    group = re.compile(rf":/opendsec-{config.instance}/\S", re.M)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and group.search(_text(entry / "cgroup")):
            command = _text(entry / "cmdline").replace("\0", " ").strip()
            found.append(f"process {entry.name}: {command[:120]}")
    return sorted(found)
