# SPDX-License-Identifier: AGPL-3.0-only
"""The distribution's packaged kernel: downloaded and unpacked, never installed on the host."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.images.apt_sources import UnsupportedHost, host_distribution

from .modules import ModuleTree, load_order
from .tools import GuestBuildError, Progress, run
from .vmlinux import kernel_release

_META_PACKAGES = {
    "debian": ("linux-image-cloud-amd64", "linux-image-amd64"),
    "ubuntu": ("linux-image-virtual", "linux-image-generic"),
}
"""Kernels for virtual machines first: they are smaller and start faster."""

_QUERY_TIMEOUT_S = 60.0
_UPDATE_TIMEOUT_S = 180.0
_DOWNLOAD_TIMEOUT_S = 600.0
_UNPACK_TIMEOUT_S = 300.0
_OWN_KERNEL = "or set guest_kernel_path to a packaged kernel (vmlinuz) with its modules"


@dataclass(frozen=True, slots=True)
class KernelTree:
    """A kernel on disk.

    Attributes:
        vmlinuz: The image.
        release: What ``uname -r`` says in it.
        modules_dir: Its ``/lib/modules/<release>``, with tables.
    """

    vmlinuz: Path
    release: str
    modules_dir: Path


@dataclass(frozen=True, slots=True)
class KernelPackage:
    """A kernel in the distribution's archive.

    Attributes:
        name: ``linux-image-6.1.0-57-cloud-amd64``.
        version: Of the package.
        apt_options: apt options under which it was found.
    """

    name: str
    version: str
    apt_options: tuple[str, ...]


class _Apt:
    """The host's apt, with its own lists of packages or with fresh ones in a scratch folder."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        # Files land in a folder that only root may enter.
        self.options = ("-o", "APT::Sandbox::User=root", *options)

    @classmethod
    def with_fresh_lists(cls, scratch: Path) -> _Apt:
        """Lists of their own: the host's are neither changed nor locked."""
        lists, cache = scratch / "lists", scratch / "cache"
        (lists / "partial").mkdir(parents=True)
        (cache / "archives/partial").mkdir(parents=True)
        apt = cls(("-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache}"))
        run(
            "reading the distribution's list of packages",
            ["apt-get", "-q", *apt.options, "update"],
            timeout_s=_UPDATE_TIMEOUT_S,
        )
        return apt

    def find(self, metas: Sequence[str]) -> KernelPackage | None:
        for meta in metas:
            name = self._dependency(meta)
            version = None if name is None else self._candidate(name)
            if name is not None and version is not None:
                return KernelPackage(name, version, self.options)
        return None

    def _query(self, *words: str) -> str:
        argv = ["apt-cache", *self.options, *words]
        try:
            out = run("asking apt for the kernel", argv, timeout_s=_QUERY_TIMEOUT_S)
        except GuestBuildError as exc:
            # It fails for packages that it does not know.
            if "exit status" in str(exc):
                return ""
            raise
        return out.decode(errors="replace")

    def _dependency(self, meta: str) -> str | None:
        """The real package behind one that always names the newest."""
        found = re.search(r"Depends: (linux-image-\d\S+)", self._query("depends", meta))
        return found.group(1) if found else None

    def _candidate(self, name: str) -> str | None:
        found = re.search(r"Candidate: (\S+)", self._query("policy", name))
        return found.group(1) if found and found.group(1) != "(none)" else None


def find_package(scratch: Path, *, fresh: bool) -> KernelPackage:
    """The kernel package that the host's distribution has for virtual machines now.

    Args:
        scratch: Folder for fresh lists.
        fresh: False: go by the host's lists if they name one. True: fetch new lists.

    Raises:
        GuestBuildError: the distribution is not known, or has none.
    """
    try:
        distribution = host_distribution()
    except UnsupportedHost as exc:
        raise GuestBuildError(
            "the guest kernel comes from the host's own packages, and this is neither Debian nor "
            "Ubuntu. Set guest_kernel_path to a packaged kernel (vmlinuz) with its modules."
        ) from exc
    metas = _META_PACKAGES[distribution.family]
    found = None if fresh else _Apt().find(metas)
    if found is None:
        found = _Apt.with_fresh_lists(scratch).find(metas)
    if found is None:
        raise GuestBuildError(
            f"the distribution's archive has none of {', '.join(metas)}. Check /etc/apt/sources, "
            f"{_OWN_KERNEL}."
        )
    return found


def fetch(package: KernelPackage, scratch: Path, progress: Progress) -> KernelTree:
    """Download a kernel package and unpack it.

    Args:
        package: What ``find_package`` found.
        scratch: Empty folder, large enough for some 200 MB.
        progress: Gets a line for people.

    Raises:
        GuestBuildError: the archive cannot be reached, or the package is not as expected.
    """
    release = package.name.removeprefix("linux-image-")
    tree = scratch / "tree"
    tree.mkdir()
    progress(f"downloading {package.name}")
    _unpack(package, package.name, scratch, tree)
    if not _modules_in(tree, release):
        # Ubuntu keeps them apart.
        _unpack(package, f"linux-modules-{release}", scratch, tree)
    modules = _modules_in(tree, release)
    vmlinuz = tree / f"boot/vmlinuz-{release}"
    if modules is None or not vmlinuz.is_file():
        raise GuestBuildError(
            f"the package {package.name} is not as expected. Report it, {_OWN_KERNEL}."
        )
    indexed = _indexed(modules, release, scratch / "indexed")
    try:
        load_order(indexed)
    except GuestBuildError:
        if host_distribution().family != "ubuntu":
            raise
        _unpack(package, f"linux-modules-extra-{release}", scratch, tree)
        shutil.copytree(modules, indexed, dirs_exist_ok=True)
        ModuleTree(scratch / "indexed", release).index()
    return KernelTree(vmlinuz, release, indexed)


def _unpack(package: KernelPackage, name: str, scratch: Path, tree: Path) -> None:
    folder = scratch / "packages" / name
    folder.mkdir(parents=True)
    wanted = f"{name}={package.version}" if name == package.name else name
    run(
        f"downloading {name}",
        ["apt-get", "-q", *package.apt_options, "download", wanted],
        timeout_s=_DOWNLOAD_TIMEOUT_S,
        cwd=folder,
    )
    files = list(folder.glob("*.deb"))
    if len(files) != 1:
        raise GuestBuildError(f"downloading {name}: apt-get left {len(files)} packages")
    argv: list[str | Path] = ["dpkg-deb", "-x", files[0], tree]
    run(f"unpacking {name}", argv, timeout_s=_UNPACK_TIMEOUT_S)
    files[0].unlink()


def _modules_in(tree: Path, release: str) -> Path | None:
    for base in ("usr/lib/modules", "lib/modules"):
        if (tree / base / release / "kernel").is_dir():
            return tree / base / release
    return None


def _indexed(modules: Path, release: str, root: Path) -> Path:
    """The modules where depmod finds them, with tables."""
    tree = ModuleTree(root, release)
    modules.rename(tree.path)
    tree.index()
    # Another package may add to it at the old place.
    modules.mkdir(parents=True, exist_ok=True)
    return tree.path


def configured(vmlinuz: Path) -> KernelTree:
    """The kernel of the setting ``guest_kernel_path``; its modules lie beside it (``modules``, or
    as in an unpacked package) or are the host's.

    Raises:
        GuestBuildError: it is not there, is no kernel, or its modules are missing.
    """
    try:
        release = kernel_release(vmlinuz.read_bytes())
    except OSError as exc:
        raise GuestBuildError(f"guest_kernel_path: cannot read {vmlinuz}: {exc.strerror}") from exc
    except GuestBuildError as exc:
        raise GuestBuildError(f"guest_kernel_path: {vmlinuz}: {exc}") from exc
    folder = vmlinuz.resolve().parent
    candidates = (
        folder / "modules",
        folder / "lib/modules" / release,
        folder.parent / "lib/modules" / release,
        folder.parent / "usr/lib/modules" / release,
        Path("/lib/modules") / release,
    )
    for path in candidates:
        if (path / "modules.dep").is_file():
            return KernelTree(vmlinuz, release, path)
    looked = ", ".join(str(path) for path in candidates)
    raise GuestBuildError(
        f"guest_kernel_path: the modules of {release} (with modules.dep, see depmod) are in none "
        f"of: {looked}"
    )
