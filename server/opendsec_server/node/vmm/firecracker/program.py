# SPDX-License-Identifier: AGPL-3.0-only
"""Finds Firecracker and its jailer, and says what a version of them can do."""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.config import Config, ConfigError
from opendsec_server.node.process import ProgramTimeout, run

FIRECRACKER_ENV = "OPENDSEC_FIRECRACKER"
JAILER_ENV = "OPENDSEC_JAILER"
SECCOMP_ENV = "OPENDSEC_FIRECRACKER_SECCOMP"
"""A filter made by ``seccompiler-bin``, for builds that come without one."""

VERSION_MIN = (1, 13)
VERSION_TIMEOUT_S = 5.0
INSTALL_FOLDERS = (Path("/opt/opendsec/bin"), Path("/usr/local/bin"))
_RELEASES = "https://github.com/firecracker-microvm/firecracker/releases"
_VERSION_RE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)\S*")
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER_BYTES = 56
_PT_INTERP = 3


@dataclass(frozen=True, slots=True)
class Features:
    """What differs between the versions we work with. From Firecracker's changelog.

    Attributes:
        pmem: virtio-pmem devices (1.14).
        free_page_reporting: Of the balloon (1.14).
        serial_rate_limit: A token bucket for the serial console (1.16).
        diff_of_any_size: Diff snapshots are right for VMs above 3 GiB as well (1.15; before,
            those of VMs with several memory slots were corrupt).
    """

    pmem: bool
    free_page_reporting: bool
    serial_rate_limit: bool
    diff_of_any_size: bool


def features_of(version: tuple[int, int, int]) -> Features:
    """What this version offers."""
    return Features(
        pmem=version >= (1, 14, 0),
        free_page_reporting=version >= (1, 14, 0),
        serial_rate_limit=version >= (1, 16, 0),
        diff_of_any_size=version >= (1, 15, 0),
    )


@dataclass(frozen=True, slots=True)
class Programs:
    """The two programs, found and tried.

    Attributes:
        firecracker: Path.
        jailer: Path.
        version: Of both, as text.
        features: What the version offers.
        seccomp_filter: A filter to load instead of the built-in ones; None: the built-in ones.
    """

    firecracker: Path
    jailer: Path
    version: str
    features: Features
    seccomp_filter: Path | None


async def find_programs(config: Config) -> Programs:
    """Find both programs and see that they can work together.

    Raises:
        ConfigError: one is missing, dynamically linked, too old, does not run, or the two are of
            different versions. Says what to install.
    """
    firecracker = _find("firecracker", config.firecracker_path, FIRECRACKER_ENV, ())
    jailer = _find("jailer", config.jailer_path, JAILER_ENV, (firecracker.parent,))
    if is_dynamic(firecracker):
        raise ConfigError(
            f"{firecracker} is linked dynamically: its libraries do not exist in the jail. "
            f"Use the static build of a release ({_RELEASES})."
        )
    version = await _version(firecracker)
    if version[:2] < VERSION_MIN:
        raise ConfigError(
            f"{firecracker} is version {_text(version)}; "
            f"{VERSION_MIN[0]}.{VERSION_MIN[1]} or newer is needed ({_RELEASES})."
        )
    of_jailer = await _version(jailer)
    if of_jailer != version:
        raise ConfigError(
            f"{jailer} is version {_text(of_jailer)}, {firecracker} is {_text(version)}: "
            "they must come from the same release."
        )
    return Programs(
        firecracker=firecracker,
        jailer=jailer,
        version=_text(version),
        features=features_of(version),
        seccomp_filter=_seccomp_filter(),
    )


def _seccomp_filter() -> Path | None:
    named = os.environ.get(SECCOMP_ENV)
    if not named:
        return None
    if not Path(named).is_file():
        raise ConfigError(f"{SECCOMP_ENV} names {named}, which is not a file")
    return Path(named)


def _find(name: str, configured: str | None, env_name: str, beside: tuple[Path, ...]) -> Path:
    for source, value in (("the setting", configured), (env_name, os.environ.get(env_name))):
        if value:
            if _executable(Path(value)):
                return Path(value).resolve()
            raise ConfigError(f"{name}: {source} names {value}, which is not an executable file")
    on_path = shutil.which(name)
    candidates = [
        *(folder / name for folder in beside),
        *([Path(on_path)] if on_path else []),
        Path(sys.executable).parent / name,
        *(folder / name for folder in INSTALL_FOLDERS),
    ]
    for candidate in candidates:
        if _executable(candidate):
            return candidate.resolve()
    raise ConfigError(
        f"{name} was not found. Install a release ({_RELEASES}) to {INSTALL_FOLDERS[0]}, "
        f"or set {env_name} to its path."
    )


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def is_dynamic(program: Path) -> bool:
    """Whether an ELF file asks for a dynamic loader. False for what is no 64-bit ELF file."""
    with program.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
        if len(head) < _ELF_HEADER.size or head[:5] != b"\x7fELF\x02":
            return False
        fields = _ELF_HEADER.unpack(head)
        offset, count = fields[5], fields[10]
        file.seek(offset)
        table = file.read(count * _PROGRAM_HEADER_BYTES)
    kinds = (
        int.from_bytes(table[at : at + 4], "little")
        for at in range(0, len(table), _PROGRAM_HEADER_BYTES)
    )
    return _PT_INTERP in kinds


async def _version(program: Path) -> tuple[int, int, int]:
    try:
        done = await run([str(program), "--version"], timeout_s=VERSION_TIMEOUT_S)
    except (OSError, ProgramTimeout) as exc:
        raise ConfigError(f"{program} does not run: {exc}") from exc
    match = _VERSION_RE.search(done.output)
    if done.code != 0 or match is None:
        raise ConfigError(f"{program} --version failed ({done.code}): {done.output[:500]}")
    return int(match[1]), int(match[2]), int(match[3])


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
