# SPDX-License-Identifier: AGPL-3.0-only
"""Times ``crun run`` of a bundle, inside the server's mount namespace. Used by create.py."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path

from opendsec_server.node.storage import rootfs


def prepare(source: Path, target: Path, userns_fd: int, id_base: int, layer: Path) -> None:
    """A bundle like the sandbox's, with /bin/true, on an overlay of its own."""
    target.mkdir(parents=True)
    disk = target / "writable"
    disk.mkdir()
    rootfs.prepare_upper(disk, hostname="bench", resolvers=())
    rootfs.mount_rootfs([layer], disk, target, userns_fd, id_base)
    config = json.loads((source / "config.json").read_text())
    config["process"]["args"] = ["/bin/true"]
    config["linux"]["cgroupsPath"] += f"-{target.name}"
    config["mounts"] = [m for m in config["mounts"] if m["destination"] != "/.opendsec/agent"]
    (target / "config.json").write_text(json.dumps(config))


async def series(folder: Path, concurrency: int, count: int) -> dict[str, object]:
    """Run all bundles, ``concurrency`` at a time."""
    remaining = iter(range(count))
    durations: list[float] = []
    failed = 0

    async def worker() -> None:
        nonlocal failed
        for number in remaining:
            command = ["crun", "--root", str(folder / "state"), "--cgroup-manager", "cgroupfs"]
            started = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                *command,
                "run",
                "--bundle",
                str(folder / f"b{number}"),
                f"bench-{number}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, stderr = await process.communicate()
            durations.append(time.perf_counter() - started)
            if process.returncode != 0:
                failed += 1
                print(stderr.decode(), file=sys.stderr)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return {"durations_s": durations, "failed": failed}


def main() -> None:
    """Arguments: bundle, pid of a guest agent, state directory, concurrency, count."""
    bundle, agent, state = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    concurrency, count = int(sys.argv[4]), int(sys.argv[5])
    id_base = int(Path(f"/proc/{agent}/uid_map").read_text().split()[1])
    userns_fd = os.open(f"/proc/{agent}/ns/user", os.O_RDONLY)
    layer = next(
        Path(line.split()[1])
        for line in Path("/proc/self/mounts").read_text().splitlines()
        if line.split()[2] == "erofs" and line.split()[1].startswith(str(state))
    )
    folder = state / "pool" / f"bench-{os.getpid()}"
    try:
        for number in range(count):
            prepare(bundle, folder / f"b{number}", userns_fd, id_base, layer)
        print(json.dumps(asyncio.run(series(folder, concurrency, count))))
    finally:
        for number in range(count):
            rootfs.unmount_rootfs(folder / f"b{number}")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
