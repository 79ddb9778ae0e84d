# SPDX-License-Identifier: AGPL-3.0-only
"""Programs that are run for images. None of them outlives the daemon, however that ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from opendsec_server.binaries import find_layer, find_lazy
from opendsec_server.config import ConfigError
from opendsec_server.contract.errors import Internal

_TIED = ("setpriv", "--pdeathsig", "KILL", "--")


def tied(argv: Sequence[str]) -> list[str]:
    """A command line whose process the kernel kills when this one is gone (prctl(2),
    ``PR_SET_PDEATHSIG``). Start it from the main thread: it is that thread's end that counts.

    Raises:
        Internal: the program is not installed.
    """
    if shutil.which(argv[0]) is None:
        raise Internal(
            f"{argv[0]} is not installed on this node",
            remediation=f"Install the package that has {Path(argv[0]).name}; see the "
            "installer's list.",
        )
    return [*_TIED, *argv]


def layer_program() -> str:
    """``opendsec-layer``.

    Raises:
        Internal: it is not installed.
    """
    return _path_of("opendsec-layer", find_layer)


def lazy_program() -> str:
    """``opendsec-lazy``.

    Raises:
        Internal: it is not installed.
    """
    return _path_of("opendsec-lazy", find_lazy)


def _path_of(package: str, find: Callable[[], Path]) -> str:
    try:
        return str(find())
    except ConfigError as exc:
        raise Internal(str(exc), remediation=f"Install the package {package}.") from exc
