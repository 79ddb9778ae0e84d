# SPDX-License-Identifier: AGPL-3.0-only
"""Does ``/dev/kvm`` really boot a guest?

That the device opens proves nothing: a paravirtual KVM accepts VMs and vCPUs, and a stock kernel
hangs in it. So a stock kernel is booted, with a time limit, until it prints its first line. The
answer is remembered per kernel release, since a hang costs the whole limit.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

BOOT_TIMEOUT_S = 20.0
BOOTED_RE = re.compile(rb"Kernel panic|Unable to mount root|Run /init|end Kernel")
ANSWER_FILE = "kvm-probe.json"


class KvmAnswer(msgspec.Struct, frozen=True):
    """What the probe found, and for which kernel."""

    usable: bool
    detail: str
    remedy: str
    kernel: str


def probe_kvm(state_dir: Path, *, kernel: Path | None = None) -> KvmAnswer:
    """Boot a guest kernel under KVM, or return the remembered answer.

    Args:
        state_dir: Where the answer is kept.
        kernel: Guest kernel image; None: the newest ``/boot/vmlinuz*``.
    """
    kept = state_dir / ANSWER_FILE
    try:
        answer = msgspec.json.decode(kept.read_bytes(), type=KvmAnswer)
        if answer.kernel == platform.release():
            return answer
    except (OSError, msgspec.DecodeError):
        pass
    if not Path("/dev/kvm").exists():
        return _answer(False, "no /dev/kvm", "Enable virtualisation in the firmware or the cloud.")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return _answer(False, "/dev/kvm cannot be opened", "Run as root.")
    qemu = shutil.which(f"qemu-system-{platform.machine()}")
    if qemu is None:
        return _answer(
            False, "not probed: no QEMU", "apt-get install qemu-system-x86, then run this again."
        )
    kernel = kernel or _newest_kernel()
    if kernel is None:
        return _answer(False, "not probed: no kernel in /boot", "Install a kernel package.")
    answer = _boot(qemu, kernel)
    if state_dir.is_dir():
        kept.write_bytes(msgspec.json.encode(answer))
        kept.chmod(0o600)
    return answer


def _boot(qemu: str, kernel: Path) -> KvmAnswer:
    """No root disk is given: a kernel that reaches its panic about it has booted."""
    argv = [
        qemu,
        *("-accel", "kvm", "-cpu", "host", "-m", "256", "-smp", "1"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", "stdio", "-kernel", str(kernel)),
        *("-append", "console=ttyS0 panic=-1 quiet loglevel=4"),
    ]
    try:
        run = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BOOT_TIMEOUT_S,
            check=False,
        )
        output = run.stdout
    except subprocess.TimeoutExpired as exc:
        output = exc.stdout or b""
        if not BOOTED_RE.search(output):
            return _answer(
                False,
                f"/dev/kvm opens, but a guest did not boot within {BOOT_TIMEOUT_S:.0f} s",
                "MicroVMs will be emulated. Ask your provider for nested virtualisation.",
            )
    if BOOTED_RE.search(output):
        return _answer(True, f"booted {kernel.name} under KVM", "")
    last = output.decode(errors="replace").strip().splitlines()
    return _answer(False, f"QEMU under KVM failed: {last[-1] if last else 'no output'}", "")


def _newest_kernel() -> Path | None:
    kernels = sorted(Path("/boot").glob("vmlinuz*"), key=lambda path: path.stat().st_mtime)
    return kernels[-1] if kernels else None


def _answer(usable: bool, detail: str, remedy: str) -> KvmAnswer:
    return KvmAnswer(usable=usable, detail=detail, remedy=remedy, kernel=platform.release())
