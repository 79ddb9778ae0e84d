# SPDX-License-Identifier: Apache-2.0
"""What an agent's archive may hold on its way to a verifier."""

from __future__ import annotations

import contextlib
import io
import random
import tarfile
from typing import IO, Any

import pytest

from opendsec import ArtifactsRefused, CommandResult, CommandTimeout, Internal, RolloutOutcome
from opendsec._artifacts import cleaned

DIR, FILE, SYM, HARD = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
FIFO, DEVICE = tarfile.FIFOTYPE, tarfile.CHRTYPE


def archive(*members: tuple[str, bytes, Any]) -> IO[bytes]:
    """Members as (name, type, content or link)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid = kind, 0o6755, 7
            if kind == FILE:
                info.size = len(value)
            elif value is not None:
                info.linkname = value
            tar.addfile(info, io.BytesIO(value) if kind == FILE else None)
    return out


def opened(source: IO[bytes], **more: Any) -> dict[str, tarfile.TarInfo]:
    with cleaned(source, "work", **{"bytes_max": 1000, **more}) as result:
        return {member.name: member for member in tarfile.open(fileobj=result)}


def test_files_directories_and_links_come_over_plain() -> None:
    found = opened(
        archive(
            ("work", DIR, None),
            ("work/a", FILE, b"text"),
            ("work/d/", DIR, None),
            ("work/d/link", SYM, "/etc/passwd"),
            ("work/d/twin", HARD, "work/a"),
            ("work/d/fifo", FIFO, None),
            ("work/d/null", DEVICE, None),
        )
    )
    assert sorted(found) == ["work", "work/a", "work/d", "work/d/link", "work/d/twin"]
    assert all(m.uid == 0 and not m.mode & 0o7022 for m in found.values() if not m.issym())
    assert found["work/d/twin"].isreg()
    assert found["work/d/twin"].size == 4
    assert opened(archive(("work", FILE, b"alone")))["work"].size == 5


@pytest.mark.parametrize(
    "members",
    [
        [("other", FILE, b"")],
        [("/work", DIR, None)],
        [("work", SYM, "/etc")],
        [("work", DIR, None), ("work/../etc/passwd", FILE, b"")],
        [("work", DIR, None), ("work/./a", FILE, b"")],
        [("work", DIR, None), ("work//a", FILE, b"")],
        # Through a link, which the extracting tar might follow.
        [("work", DIR, None), ("work/l", SYM, "/etc"), ("work/l/passwd", FILE, b"x")],
        [("work", DIR, None), ("work/l", SYM, "/etc"), ("work/l", DIR, None)],
        [("work", DIR, None), ("work/a", FILE, b"1"), ("work/a", FILE, b"2")],
        [("work/a", FILE, b"")],
        [("work", DIR, None), ("work/a", HARD, "/etc/passwd")],
        [("work", DIR, None), ("work/a", HARD, "work/b"), ("work/b", HARD, "work/a")],
        [("work", DIR, None), ("work/a", HARD, "work/a")],
        [("work", DIR, None), ("work/a", FILE, b"x" * 600), ("work/b", FILE, b"x" * 600)],
        [
            ("work", DIR, None),
            ("work/a", FILE, b"x" * 400),
            ("work/b", HARD, "work/a"),
            ("work/c", HARD, "work/a"),
        ],
    ],
)
def test_what_is_refused(members: list[tuple[str, bytes, Any]]) -> None:
    with pytest.raises(ArtifactsRefused):
        cleaned(archive(*members), "work", bytes_max=1000)


def test_a_sparse_file_counts_as_long_as_it_reads() -> None:
    # GNU's old form: a header that says 1 TiB, and no data.
    info = tarfile.TarInfo("work")
    header = bytearray(info.tobuf(format=tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[483:495] = b"\x80\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00"
    checksum = sum(header[:148]) + sum(header[156:512]) + 8 * 32
    header[148:156] = b"%06o\0 " % checksum
    with pytest.raises(ArtifactsRefused):
        cleaned(io.BytesIO(bytes(header) + bytes(10240)), "work", bytes_max=1000)


def test_noise_is_refused_and_nothing_else() -> None:
    good = archive(
        ("work", DIR, None), ("work/a", FILE, b"text" * 200), ("work/l", SYM, "a"),
        ("work/h", HARD, "work/a"),
    ).getvalue()  # type: ignore[attr-defined]  # fmt: skip
    draw = random.Random(7)
    for _ in range(3000):
        noisy = bytearray(good)
        for _ in range(draw.randint(1, 12)):
            noisy[draw.randrange(len(noisy))] = draw.randrange(256)
        cut = io.BytesIO(noisy[: draw.randint(0, len(noisy))])
        with contextlib.suppress(ArtifactsRefused):
            cleaned(cut, "work", bytes_max=4000).close()


def test_headers_about_headers_about_headers_are_refused() -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 5
    one = info.tobuf(format=tarfile.GNU_FORMAT) + b"work\0".ljust(512, b"\0")
    with pytest.raises(ArtifactsRefused):
        cleaned(io.BytesIO(one * 5000), "work", bytes_max=1000)


def ended(code: int) -> CommandResult:
    return CommandResult(exit_code=code, signal=None)


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        (RolloutOutcome[None](phase="done", verified=ended(0)), True),
        (RolloutOutcome[None](phase="done", verified=ended(1)), False),
        (RolloutOutcome[None](phase="done"), None),
        # The verifier's sandbox could not be ended: what it said stands.
        (RolloutOutcome[None](phase="verify", verified=ended(0), error=Internal("x")), True),
        (RolloutOutcome[None](phase="rollout", error=Internal("x")), None),
        (RolloutOutcome[None](phase="verify", error=Internal("x")), None),
        (RolloutOutcome[None](phase="collect", error=ArtifactsRefused("x")), False),
    ],
)
def test_what_may_be_scored(outcome: RolloutOutcome[None], passed: bool | None) -> None:
    assert outcome.passed is passed


def test_time_that_runs_out_is_the_agents_only_where_it_has_a_say() -> None:
    error = CommandTimeout("x", stdout="", stderr="", timeout_s=1)
    by_phase = {
        phase: RolloutOutcome[None](phase=phase, error=error).passed
        for phase in ("create", "setup", "rollout", "collect", "verify")
    }
    assert by_phase == {
        "create": None, "setup": None, "rollout": False, "collect": False, "verify": False,
    }  # fmt: skip
