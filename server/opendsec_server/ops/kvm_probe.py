# SPDX-License-Identifier: AGPL-3.0-only
"""Does ``/dev/kvm`` really boot a guest?

That the device opens proves nothing: a paravirtual KVM accepts VMs and vCPUs, and a stock kernel
hangs in it. So a stock kernel is booted, with a time limit, until it has nothing left to do but
to look for a root file system. The answer is remembered, since a hang costs the whole limit: a
good one for as long as kernel and processor stay the same, a bad one until the next boot of this
machine (somebody may have switched nested virtualisation on meanwhile).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

BOOT_TIMEOUT_S = 20.0
TIMEOUT_ENV = "OPENDSEC_KVM_PROBE_TIMEOUT_S"
"""For hosts that are themselves emulated, where a good KVM is slow."""
ANSWER_FILE = Path("/run/opendsec-kvm-probe.json")
"""Of the machine, not of one instance: every instance would find the same."""

_BOOTED_RE = re.compile(rb"Kernel panic|Unable to mount root|Run /init|end Kernel")
_OUTPUT_BYTES_MAX = 256 * 1024
_KILL_AFTER_S = 5.0
"""How long after our own limit a probe ends by itself, should we be killed while it runs."""
_CMDLINE = "console=ttyS0 panic=-1 reboot=t quiet loglevel=4"
_KVM = Path("/dev/kvm")


class KvmAnswer(msgspec.Struct, frozen=True):
    """What the probe found, and for which machine."""

    usable: bool
    detail: str
    remedy: str
    kernel: str
    """Release of the host's kernel."""
    cpu: str = ""
    boot_id: str = ""
    probed: bool = True
    """False: there was nothing to boot, so nothing is known."""


def probe_kvm(
    state_dir: Path, *, kernel: Path | None = None, answer_file: Path = ANSWER_FILE
) -> KvmAnswer:
    """Boot a guest kernel under KVM, or return the remembered answer. Blocks, at most for the
    time limit and some seconds.

    Args:
        state_dir: Where microVMs' own guest kernel may be.
        kernel: Guest kernel image (``vmlinuz``); None: the guest kernel of microVMs, else the
            newest ``/boot/vmlinuz*``.
        answer_file: Where the answer is kept.
    """
    if not _KVM.exists():
        return _answer(False, "no /dev/kvm", "Enable virtualisation in the firmware or the cloud.")
    if not os.access(_KVM, os.R_OK | os.W_OK):
        return _answer(False, "/dev/kvm cannot be opened", "Run as root.")
    remembered = _remembered(answer_file)
    if remembered is not None:
        return remembered
    candidates = [kernel] if kernel else [*_guest_kernels(state_dir), *_host_kernels()]
    with tempfile.TemporaryDirectory(prefix="opendsec-kvm-") as scratch:
        argv = _command(candidates, Path(scratch))
        if isinstance(argv, KvmAnswer):
            return argv
        answer = _boot(argv)
    _remember(answer, answer_file)
    return answer


def _remember(answer: KvmAnswer, answer_file: Path) -> None:
    """Best effort: an answer that cannot be kept is only found again."""
    with contextlib.suppress(OSError):
        fd, fresh = tempfile.mkstemp(prefix=f"{answer_file.name}.", dir=answer_file.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(answer))
        Path(fresh).replace(answer_file)


def _remembered(kept: Path) -> KvmAnswer | None:
    try:
        answer = msgspec.json.decode(kept.read_bytes(), type=KvmAnswer)
    except (OSError, msgspec.DecodeError):
        return None
    if (answer.kernel, answer.cpu) != (platform.release(), _cpu()):
        return None
    return answer if answer.usable or answer.boot_id == _boot_id() else None


def _guest_kernels(state_dir: Path) -> list[Path]:
    found = state_dir.glob("images/guest/*/vmlinuz")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _host_kernels() -> list[Path]:
    found = Path("/boot").glob("vmlinuz*")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _command(candidates: list[Path], scratch: Path) -> list[str] | KvmAnswer:
    """How to boot one of these kernels here, or why it cannot be tried."""
    if not candidates:
        return _unknown("no kernel to boot", "Install a kernel package, or create a microVM.")
    qemu = shutil.which(f"qemu-system-{platform.machine()}")
    if qemu is not None:
        return [
            qemu,
            *("-accel", "kvm", "-cpu", "host", "-m", "256", "-smp", "1"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-serial", "stdio", "-kernel", str(candidates[0]), "-append", _CMDLINE),
        ]
    firecracker = os.environ.get("OPENDSEC_FIRECRACKER") or shutil.which("firecracker")
    elf = next(
        (k.with_name("vmlinux") for k in candidates if k.with_name("vmlinux").exists()), None
    )
    if firecracker is None or elf is None:
        return _unknown(
            "no QEMU, and no Firecracker with a guest kernel",
            "apt-get install qemu-system-x86, then run this again.",
        )
    settings = scratch / "vm.json"
    settings.write_text(
        json.dumps(
            {
                "boot-source": {"kernel_image_path": str(elf), "boot_args": _CMDLINE},
                "drives": [],
                "machine-config": {"vcpu_count": 1, "mem_size_mib": 256},
            }
        )
    )
    return [firecracker, "--no-api", "--config-file", str(settings)]


def _boot(argv: list[str]) -> KvmAnswer:
    """No root disk is given: a kernel that reaches its panic about it has booted."""
    limit_s = _limit_s()
    name = Path(argv[0]).name
    # timeout(1) ends a guest that hangs even if this process is killed meanwhile.
    guard = ["timeout", "--signal=KILL", f"{limit_s + _KILL_AFTER_S:.0f}"]
    with _running([*guard, *argv]) as program:
        output, timed_out = _read_until_booted(program, time.monotonic() + limit_s)
    if _BOOTED_RE.search(output):
        return _answer(True, f"a guest booted under KVM with {name}", "")
    if timed_out:
        return _answer(
            False,
            f"/dev/kvm opens, but a guest did not boot within {limit_s:.0f} s",
            "MicroVMs will be emulated. Ask your provider for nested virtualisation.",
        )
    last = output.decode(errors="replace").strip().splitlines()
    return _answer(False, f"{name} under KVM failed: {last[-1] if last else 'no output'}", "")


def _limit_s() -> float:
    try:
        return max(1.0, float(os.environ[TIMEOUT_ENV]))
    except (KeyError, ValueError):
        return BOOT_TIMEOUT_S


@contextlib.contextmanager
def _running(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    program = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, 9)
        program.wait()
        assert program.stdout is not None
        program.stdout.close()


def _read_until_booted(program: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """Its output, up to what shows that the guest has booted; and whether the time was up."""
    assert program.stdout is not None
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(program.stdout, selectors.EVENT_READ)
        while len(output) < _OUTPUT_BYTES_MAX:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                return output, True
            data = os.read(program.stdout.fileno(), 65_536)
            output += data
            if not data or _BOOTED_RE.search(output):
                break
    return output, False


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _unknown(why: str, remedy: str) -> KvmAnswer:
    return msgspec.structs.replace(_answer(False, f"not probed: {why}", remedy), probed=False)


def _answer(usable: bool, detail: str, remedy: str) -> KvmAnswer:
    return KvmAnswer(
        usable=usable,
        detail=detail,
        remedy=remedy,
        kernel=platform.release(),
        cpu=_cpu(),
        boot_id=_boot_id(),
    )
