# SPDX-License-Identifier: AGPL-3.0-only
"""Docker, to compare with: a daemon of its own that leaves the machine's network alone; and the
files that images for it are made of."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def docker_daemon(registry: str | None = None) -> Iterator[list[str]]:
    """A private dockerd that may ask the registry without TLS; yields the client's command."""
    insecure = () if registry is None else ("--insecure-registry", registry)
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-docker-", dir="/var/tmp") as folder:
        client = ["docker", "-H", f"unix://{folder}/docker.sock"]
        daemon = subprocess.Popen(
            [
                *("dockerd", "--iptables=false", "--bridge=none"),
                *insecure,
                *("-H", f"unix://{folder}/docker.sock", "--data-root", f"{folder}/data"),
                *("--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(150):
                asked = subprocess.run([*client, "info"], capture_output=True, check=False)
                if asked.returncode == 0:
                    break
                time.sleep(0.2)
            else:
                raise RuntimeError("dockerd does not answer")
            yield client
        finally:
            daemon.terminate()
            daemon.wait()
            shutil.rmtree(f"{folder}/exec", ignore_errors=True)


@contextlib.contextmanager
def mounted(layer: Path) -> Iterator[Path]:
    """The files of a layer."""
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-tree-", dir="/var/tmp") as folder:
        subprocess.run(["mount", "-t", "erofs", "-o", "ro", layer, folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)
