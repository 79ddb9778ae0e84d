# SPDX-License-Identifier: AGPL-3.0-only
"""Runs one tiny container with the host's own ``/bin/true``, to see that the runtime works."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

TIMEOUT_S = 20.0
NAMESPACES = ("pid", "mount", "ipc", "uts", "network", "cgroup")


def run_probe(folder: Path, runtime: str, *, instance: str) -> str | None:
    """Run the container; return None, or the runtime's complaint in one line."""
    name = f"{instance}-doctor-{uuid.uuid4().hex[:8]}"
    bundle = folder / "bundle"
    rootfs = bundle / "rootfs"
    rootfs.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps(_spec(name)))
    # crun refuses hybrid cgroups unless the v2 side is out of its sight.
    script = (
        'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$0" --root "$1" run --bundle "$2" "$3"'
    )
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    try:
        run = subprocess.run(
            [*command, runtime, str(folder / "state"), str(bundle), name],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{runtime} did not end within {TIMEOUT_S:.0f} s"
    finally:
        subprocess.run(
            [runtime, "--root", str(folder / "state"), "delete", "--force", name],
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    if run.returncode == 0:
        return None
    lines = (run.stderr or run.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {run.returncode}"


def _spec(name: str) -> dict[str, Any]:
    # The host's own programs and libraries, read-only: no image is needed for a probe.
    binds = [path for path in map(Path, ("/usr", "/bin", "/lib", "/lib64")) if path.exists()]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
        *(
            {
                "destination": str(path),
                "type": "bind",
                "source": str(path.resolve()),
                "options": ["rbind", "ro"],
            }
            for path in binds
        ),
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/true"],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": False},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in NAMESPACES],
            "cgroupsPath": f"/opendsec-{name}",
            "resources": {"memory": {"limit": 64 * 1024 * 1024}, "pids": {"limit": 32}},
        },
    }
