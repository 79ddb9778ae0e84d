# SPDX-License-Identifier: AGPL-3.0-only
"""Importing disk images: what is kept, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from opendsec_server.images.disk_images import (
    CMDLINE_DEFAULT,
    DiskImageError,
    DiskImageNotFound,
    DiskImages,
)

MIB = 1024 * 1024


@pytest.fixture
def images(tmp_path: Path) -> DiskImages:
    """An empty store."""
    return DiskImages(tmp_path / "images")


def raw_file(path: Path, mib: int, *, boots: bool = False, mark: bytes = b"") -> Path:
    """A sparse disk with something at its end."""
    with path.open("wb") as file:
        file.truncate(mib * MIB)
        if boots:
            file.write(b"\xeb\x63\x90")
            file.seek(510)
            file.write(b"\x55\xaa")
        file.seek(mib * MIB - 512)
        file.write(mark.ljust(512, b"\0"))
    return path


def qcow2(*arguments: object) -> None:
    """qemu-img, or a skip where there is none."""
    if shutil.which("qemu-img") is None:
        pytest.skip("qemu-img is not installed")
    argv = ["qemu-img", *(str(argument) for argument in arguments)]
    subprocess.run(argv, check=True, capture_output=True)


def test_a_raw_image_is_kept_sparse(images: DiskImages, tmp_path: Path) -> None:
    source = raw_file(tmp_path / "a.raw", 64, mark=b"end")
    image = images.add("one", source, at=1.0)
    assert (image.size_mb, image.source_format, image.firmware) == (64, "raw", "uefi")
    kept = images.disk(images.find("one"))
    assert kept.read_bytes() == source.read_bytes()
    assert kept.stat().st_blocks * 512 < MIB
    assert kept.stat().st_mode & 0o777 == 0o444


def test_a_qcow2_image_becomes_the_same_disk(images: DiskImages, tmp_path: Path) -> None:
    source = raw_file(tmp_path / "a.raw", 8, boots=True, mark=b"end")
    qcow2("convert", "-O", "qcow2", source, tmp_path / "a.qcow2")
    image = images.add("one", tmp_path / "a.qcow2", at=1.0)
    assert (image.source_format, image.firmware) == ("qcow2", "bios")
    assert images.disk(image).read_bytes() == source.read_bytes()


def test_files_of_the_host_are_not_imported(images: DiskImages, tmp_path: Path) -> None:
    base = raw_file(tmp_path / "base.raw", 1)
    qcow2("create", "-f", "qcow2", "-b", base, "-F", "raw", tmp_path / "over.qcow2")
    with pytest.raises(DiskImageError, match="only the difference"):
        images.add("one", tmp_path / "over.qcow2", at=1.0)
    data = tmp_path / "data"
    qcow2("create", "-f", "qcow2", "-o", f"data_file={data}", tmp_path / "split.qcow2", "1M")
    with pytest.raises(DiskImageError, match="in another file"):
        images.add("one", tmp_path / "split.qcow2", at=1.0)
    assert images.names() == {}
    assert not list((tmp_path / "images/disks").glob(".new*"))


def test_damaged_and_empty_files(images: DiskImages, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DiskImageError, match="empty"):
        images.add("one", tmp_path / "empty", at=1.0)
    with pytest.raises(DiskImageError, match="cannot read"):
        images.add("one", tmp_path / "missing", at=1.0)
    if shutil.which("qemu-img") is None:
        pytest.skip("qemu-img is not installed")
    (tmp_path / "half").write_bytes(b"QFI\xfb" + b"\0" * 40)
    with pytest.raises(DiskImageError, match="qemu-img info"):
        images.add("one", tmp_path / "half", at=1.0)


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "-a", "a" * 64])
def test_names(images: DiskImages, tmp_path: Path, name: str) -> None:
    with pytest.raises(DiskImageError, match="no name"):
        images.add(name, raw_file(tmp_path / "a.raw", 1), at=1.0)


def test_direct_needs_a_kernel_and_keeps_it(images: DiskImages, tmp_path: Path) -> None:
    disk, kernel = raw_file(tmp_path / "a.raw", 1), tmp_path / "vmlinuz"
    kernel.write_bytes(b"kernel")
    with pytest.raises(DiskImageError, match="needs a kernel"):
        images.add("one", disk, at=1.0, firmware="direct")
    with pytest.raises(DiskImageError, match="belong to firmware direct"):
        images.add("one", disk, at=1.0, firmware="bios", kernel=kernel)
    image = images.add("one", disk, at=1.0, kernel=kernel)
    assert (image.firmware, image.cmdline) == ("direct", CMDLINE_DEFAULT)
    assert images.kernel(image).read_bytes() == b"kernel"
    assert not images.initrd(image).exists()


def test_a_name_moves_on_and_what_has_none_goes(images: DiskImages, tmp_path: Path) -> None:
    first = images.add("one", raw_file(tmp_path / "a.raw", 1, mark=b"a"), at=1.0)
    assert images.add("two", tmp_path / "a.raw", at=2.0).digest == first.digest
    second = images.add("one", raw_file(tmp_path / "b.raw", 1, mark=b"b"), at=3.0)
    assert images.find("one").digest == second.digest
    assert images.disk(images.find("two")).exists()
    assert images.remove("two")
    assert not images.disk(first).exists()
    assert not images.remove("two")
    with pytest.raises(DiskImageNotFound):
        images.find("two")


def test_the_way_it_starts_is_part_of_what_it_is(images: DiskImages, tmp_path: Path) -> None:
    disk = raw_file(tmp_path / "a.raw", 1)
    one = images.add("one", disk, at=1.0, firmware="bios")
    two = images.add("two", disk, at=1.0, firmware="uefi")
    assert one.digest != two.digest
    assert (images.find("one").firmware, images.find("two").firmware) == ("bios", "uefi")
