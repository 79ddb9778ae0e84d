# SPDX-License-Identifier: AGPL-3.0-only
"""The host's distribution and its package mirrors, so that images come from the same place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DEFAULT_MIRRORS = {
    "debian": (
        ("http://deb.debian.org/debian", ""),
        ("http://deb.debian.org/debian", "-updates"),
        ("http://deb.debian.org/debian-security", "-security"),
    ),
    "ubuntu": (
        ("http://archive.ubuntu.com/ubuntu", ""),
        ("http://archive.ubuntu.com/ubuntu", "-updates"),
        ("http://security.ubuntu.com/ubuntu", "-security"),
    ),
}
_COMPONENTS = {"debian": ("main",), "ubuntu": ("main", "universe")}
_POCKETS = ("", "-updates", "-security")


class UnsupportedHost(Exception):
    """The host's distribution cannot give the template; the message says which can."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A release of a distribution.

    Attributes:
        family: ``debian`` or ``ubuntu``: decides mirrors and components.
        codename: Release name, ``bookworm``.
        pretty: For people.
    """

    family: str
    codename: str
    pretty: str


def host_distribution(os_release: Path = Path("/etc/os-release")) -> Distribution:
    """The host's release, or the one that a derivative is built on.

    Raises:
        UnsupportedHost: not of the Debian family.
    """
    values = {}
    for line in os_release.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values[name] = value.strip().strip('"')
    kinds = [values.get("ID", ""), *values.get("ID_LIKE", "").split()]
    pretty = values.get("PRETTY_NAME", kinds[0])
    if "ubuntu" in kinds:
        codename = values.get("UBUNTU_CODENAME") or values.get("VERSION_CODENAME", "")
        return Distribution("ubuntu", codename, pretty)
    if "debian" in kinds:
        codename = values.get("DEBIAN_CODENAME") or values.get("VERSION_CODENAME", "")
        return Distribution("debian", codename or "sid", pretty)
    raise UnsupportedHost(
        f"the template base is made from the host's own packages with mmdebstrap; {pretty} is not "
        "Debian or Ubuntu. Build it on such a machine and copy state_dir/images here."
    )


def mirror_lines(distribution: Distribution, etc_apt: Path = Path("/etc/apt")) -> list[str]:
    """One-line apt sources for the release: the host's mirrors where it names some, else the
    distribution's own. Third parties' archives are left out."""
    wanted = [distribution.codename + pocket for pocket in _POCKETS]
    found: dict[str, str] = {}
    for uri, suite in _host_entries(etc_apt):
        if suite in wanted and _is_archive(uri, distribution.family):
            found.setdefault(suite, uri)
    for uri, pocket in _DEFAULT_MIRRORS[distribution.family]:
        if distribution.codename != "sid" or not pocket:
            found.setdefault(distribution.codename + pocket, uri)
    components = " ".join(_COMPONENTS[distribution.family])
    return [f"deb {found[suite]} {suite} {components}" for suite in wanted if suite in found]


def _is_archive(uri: str, family: str) -> bool:
    """Mirrors of the archive itself end in the family's name, whatever host they are on."""
    last = uri.rstrip("/").rpartition("/")[2]
    return last in (family, f"{family}-security", f"{family}-ports", "ubuntu-ports")


def _host_entries(etc_apt: Path) -> Iterator[tuple[str, str]]:
    """Pairs of URI and suite from both formats of sources.list(5)."""
    lists = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*.list"))]
    for path in lists:
        if path.is_file():
            yield from _one_line_entries(path.read_text())
    for path in sorted((etc_apt / "sources.list.d").glob("*.sources")):
        yield from _deb822_entries(path.read_text())


def _one_line_entries(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)", line)
        if match:
            yield match.group(1), match.group(2)


def _deb822_entries(text: str) -> Iterator[tuple[str, str]]:
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, list[str]] = {}
        for line in stanza.splitlines():
            name, colon, value = line.partition(":")
            if colon and not line.startswith(("#", " ")):
                fields[name.strip().lower()] = value.split()
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            for uri in fields.get("uris", []):
                for suite in fields.get("suites", []):
                    yield uri, suite
