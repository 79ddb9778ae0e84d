# SPDX-License-Identifier: AGPL-3.0-only
"""The OCI runtime program: crun, runc or one with the same command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from opendsec_server.config import ConfigError
from opendsec_server.contract.errors import NodeFull, SandboxStartFailed
from opendsec_server.node import limits
from opendsec_server.node.process import ProgramTimeout, reap_strays, run

_VERSION_TIMEOUT_S = 5.0


class OciRuntime:
    """Starts and deletes containers.

    Args:
        program: Name or path.
        root: Directory of the runtime's state.
    """

    def __init__(self, program: str, root: Path) -> None:
        self._asked_for = program
        self._root = root
        self._program = ""
        self.version = ""

    @property
    def name(self) -> str:
        """The program's name, without its path."""
        return Path(self._asked_for).name

    @property
    def takes_compiled_seccomp(self) -> bool:
        """Whether the program knows crun's annotation for a ready filter."""
        return self.name.startswith("crun")

    async def probe(self) -> None:
        """Find the program and learn its version.

        Raises:
            ConfigError: it is not there or does not run.
        """
        found = shutil.which(self._asked_for)
        if found is None:
            raise ConfigError(
                f"OCI runtime {self._asked_for!r} is not installed. "
                "Install the package crun, or set oci_runtime to the path of crun or runc."
            )
        self._program = found
        done = await run([found, "--version"], timeout_s=_VERSION_TIMEOUT_S)
        if done.code != 0:
            raise ConfigError(f"{found} --version failed: {done.output}")
        match = re.search(r"version (\S+)", done.output)
        self.version = match.group(1) if match else done.output.splitlines()[0]

    def _command(self, *arguments: str) -> list[str]:
        manager = ["--cgroup-manager", "cgroupfs"] if self.name.startswith("crun") else []
        return [self._program, "--root", str(self._root), *manager, *arguments]

    async def start(self, container_id: str, bundle: Path, output: Path) -> int:
        """Create and start a container; returns the pid of its first process.

        Args:
            container_id: Its name for the runtime.
            bundle: Directory with ``config.json``.
            output: File that gets what the runtime and the container's first process print.

        Raises:
            SandboxStartFailed: the runtime is gone, refused or hung.
        """
        pid_file = bundle / "pid"
        command = self._command(
            "run", "--detach", "--bundle", str(bundle), "--pid-file", str(pid_file), container_id
        )
        try:
            done = await run(command, timeout_s=limits.RUNTIME_TIMEOUT_S, output_path=output)
        except FileNotFoundError as exc:
            raise SandboxStartFailed(
                f"the OCI runtime {self._program} has disappeared",
                remediation="Install crun again on the node.",
            ) from exc
        except BlockingIOError as exc:  # EAGAIN of fork(2)
            raise NodeFull(
                "the node cannot start another process: its process table is full"
            ) from exc
        except ProgramTimeout as exc:
            raise SandboxStartFailed(str(exc)) from exc
        finally:
            self.reap_strays()
        if done.code != 0:
            raise SandboxStartFailed(f"{self.name} could not start the sandbox: {done.output}")
        return int(pid_file.read_text())

    def reap_strays(self) -> None:
        """Reap what the runtime left behind when it detached."""
        reap_strays(self.name)

    async def delete(self, container_id: str) -> None:
        """Kill what runs of a container and forget it. Idempotent.

        Raises:
            OSError, ProgramTimeout, RuntimeError: it could not be done.
        """
        if not (self._root / container_id).exists():
            return
        done = await run(
            self._command("delete", "--force", container_id), timeout_s=limits.RUNTIME_TIMEOUT_S
        )
        if done.code != 0 and (self._root / container_id).exists():
            raise RuntimeError(f"{self.name} delete failed: {done.output}")

    def known(self) -> list[str]:
        """Ids of all containers that the runtime has state of."""
        if not self._root.is_dir():
            return []
        return [p.name for p in self._root.iterdir() if p.is_dir() and not p.name.startswith(".")]
