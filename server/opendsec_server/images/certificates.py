# SPDX-License-Identifier: AGPL-3.0-only
"""Certificate authorities that the host trusts beyond those of the distribution.

Many networks re-sign TLS; what runs in a sandbox must then trust the same authority as the host.
"""

from __future__ import annotations

import re
from pathlib import Path

HOST_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+?-----END CERTIFICATE-----")


def certificates_in(text: str) -> list[str]:
    """The certificates of a PEM text, each normalised, in order, none twice."""
    found: dict[str, None] = {}
    for block in _PEM.findall(text):
        found["\n".join(line.strip() for line in block.splitlines() if line.strip())] = None
    return list(found)


def host_authorities(extra: Path | None) -> list[str]:
    """What the host trusts, or the setting ``extra_ca_certs`` where it is set.

    Raises:
        OSError: the file of the setting cannot be read.
    """
    if extra is not None:
        return certificates_in(extra.read_text())
    try:
        return certificates_in(HOST_BUNDLE.read_text())
    except OSError:
        return []


def install_missing(authorities: list[str], root: Path) -> int:
    """Write those that an image does not have where ``update-ca-certificates`` finds them;
    returns how many."""
    bundle = root / HOST_BUNDLE.relative_to("/")
    known = set(certificates_in(bundle.read_text())) if bundle.exists() else set()
    missing = [pem for pem in authorities if pem not in known]
    target = root / "usr/local/share/ca-certificates"
    target.mkdir(parents=True, exist_ok=True)
    for index, pem in enumerate(missing):
        (target / f"host-{index:03}.crt").write_text(pem + "\n")
    return len(missing)
