# SPDX-License-Identifier: AGPL-3.0-only
"""Docker, to compare with: a daemon of its own that leaves the machine's network alone."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator


@contextlib.contextmanager
def docker_daemon(registry: str) -> Iterator[list[str]]:
    """A private dockerd that may ask the registry without TLS; yields the client's command."""
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-docker-", dir="/var/tmp") as folder:
        client = ["docker", "-H", f"unix://{folder}/docker.sock"]
        daemon = subprocess.Popen(
            [
                *("dockerd", "--iptables=false", "--bridge=none"),
                *("--insecure-registry", registry),
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
