# SPDX-License-Identifier: AGPL-3.0-only
"""Where distributions put UEFI firmware for virtual machines (OVMF)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opendsec_server.contract.errors import NotSupported

FOLDERS = (
    Path("/usr/share/OVMF"),
    Path("/usr/share/edk2/x64"),
    Path("/usr/share/edk2/ovmf"),
    Path("/usr/share/edk2-ovmf/x64"),
    Path("/usr/share/qemu/ovmf"),
)

_PAIRS = (
    ("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"),
    ("OVMF_CODE.4m.fd", "OVMF_VARS.4m.fd"),
    ("OVMF_CODE.fd", "OVMF_VARS.fd"),
)
"""Program, and the empty store of variables that fits it. Those that enforce Secure Boot are not
among them: they need a machine with SMM, and would refuse most people's own kernels."""


@dataclass(frozen=True, slots=True)
class Uefi:
    """The firmware's two files.

    Attributes:
        code: Program; read only, shared by all machines.
        variables: Template of the store of variables; every machine has its own copy.
    """

    code: Path
    variables: Path


def find_uefi(folder: str | None) -> Uefi:
    """The firmware.

    Args:
        folder: Where to look alone; None: in all of ``FOLDERS``.

    Raises:
        NotSupported: there is none; says what to install.
    """
    for place in FOLDERS if folder is None else (Path(folder),):
        for code, variables in _PAIRS:
            if (place / code).is_file() and (place / variables).is_file():
                return Uefi(place / code, place / variables)
    where = folder or ", ".join(str(place) for place in FOLDERS)
    raise NotSupported(
        f"no UEFI firmware is on this node (looked in {where})",
        remediation="Install the package ovmf, or start the image by `bios`.",
    )
