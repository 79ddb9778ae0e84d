# SPDX-License-Identifier: AGPL-3.0-only
"""The check of a disk that a machine wrote: it mends, it refuses, and it has no power."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec_server.contract.errors import SnapshotFailed
from opendsec_server.node.packing import _check_disk

SIZE_BYTES = 16 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "tree/upper").mkdir(parents=True)
    (tmp_path / "tree/upper/file").write_text("kept")
    path = tmp_path / "pack.ext4"
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-d", str(tmp_path / "tree"), str(path)], check=True)
    return path


def debugfs(disk: Path, command: str, *options: str) -> str:
    argv = ["debugfs", *options, "-R", command, str(disk)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def in_place_of_e2fsck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script that is run instead, where anybody may run it."""
    folder = Path(tempfile.mkdtemp(prefix="opendsec-checker-"))
    try:
        folder.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield folder / "e2fsck"
    finally:
        shutil.rmtree(folder)


async def test_a_sound_disk_passes(disk: Path) -> None:
    await _check_disk(disk)
    assert debugfs(disk, "cat /upper/file") == "kept"
    assert disk.stat().st_mode & 0o777 == 0o600
    assert disk.stat().st_size == SIZE_BYTES


async def test_a_damaged_directory_is_mended(disk: Path) -> None:
    debugfs(disk, "clri /upper/file", "-w")
    await _check_disk(disk)
    assert subprocess.run(["e2fsck", "-fn", str(disk)], capture_output=True).returncode == 0


@pytest.mark.parametrize("content", [b"", b"\0" * SIZE_BYTES, os.urandom(1 << 20)])
async def test_what_is_no_file_system_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pack.ext4"
    path.write_bytes(content)
    with pytest.raises(SnapshotFailed, match="damaged"):
        await _check_disk(path)


async def test_a_link_in_its_place_is_not_followed(disk: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(disk)
    before = disk.stat()
    with pytest.raises(OSError, match="symbolic"):
        await _check_disk(link)
    assert disk.stat() == before


async def test_it_has_no_power(disk: Path, in_place_of_e2fsck: Path) -> None:
    secret = disk.parent / "secret"
    secret.touch(0o600)
    in_place_of_e2fsck.write_text(
        "#!/bin/sh\n"
        "id; grep -E '^(Cap|NoNew)' /proc/self/status; ulimit -f -v -c\n"
        f"cat {secret} || echo closed; : <>/proc/self/fd/0 && echo open\n"
        "exit 8\n"
    )
    in_place_of_e2fsck.chmod(0o755)
    with pytest.raises(SnapshotFailed) as refused:
        await _check_disk(disk)
    said = refused.value.message
    assert "uid=65534" in said
    assert "gid=65534" in said
    assert " 0(" not in said
    caps = dict(re.findall(r"^(Cap\w+):\s*(\w+)$", said, re.MULTILINE))
    assert set(caps) == {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
    assert set(caps.values()) == {"0" * 16}
    assert re.search(r"^NoNewPrivs:\s*1$", said, re.MULTILINE)
    assert "closed" in said
    assert "open" in said.splitlines()


async def test_one_that_crashes_is_no_sound_disk(disk: Path, in_place_of_e2fsck: Path) -> None:
    in_place_of_e2fsck.write_text("#!/bin/sh\nkill -SEGV $$\n")
    in_place_of_e2fsck.chmod(0o755)
    with pytest.raises(SnapshotFailed, match="damaged"):
        await _check_disk(disk)


async def test_it_cannot_write_beyond_the_disk(disk: Path, in_place_of_e2fsck: Path) -> None:
    script = "#!/bin/sh\nhead -c 33554432 /dev/zero 1<>/proc/self/fd/0 || exit 8\n"
    in_place_of_e2fsck.write_text(script)
    in_place_of_e2fsck.chmod(0o755)
    with pytest.raises(SnapshotFailed, match="too large"):
        await _check_disk(disk)
    assert disk.stat().st_size == SIZE_BYTES
