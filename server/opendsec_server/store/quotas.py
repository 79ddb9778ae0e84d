# SPDX-License-Identifier: AGPL-3.0-only
"""What a project may use, and whether more of it fits: inside of other transactions.

A sandbox counts in its project and in every project above, and so does a build at work. Triggers
keep those sums (migrations 0004 and 0010), so that a decision reads a row for each of these
projects, however many sandboxes there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import QuotaExceeded

from .records import SandboxRecord
from .tables import PROJECT_LINES, PROJECT_USE, PROJECTS

NO_LIMIT = 2**31 - 1
"""In ``projects.sandboxes_max``: the project has no limit of its own."""
DAY_S = 86_400
MB = 1_048_576
RATE_BURST_S = 1.0
"""How many seconds' worth of creates may come at once."""
RATE_RETRY_S_MAX = 60


class Wanted(msgspec.Struct, kw_only=True, frozen=True):
    """What one sandbox takes of its project's quota while it runs."""

    cpu: float
    memory_mb: int
    disk_mb: int
    gpu: int = 0


class Admitted(msgspec.Struct, kw_only=True, frozen=True):
    """How many of those that were wanted fit, in order."""

    count: int
    refusal: QuotaExceeded | None
    """Why the first that does not fit does not. None: all fit."""


class _Dimension(msgspec.Struct, kw_only=True, frozen=True):
    """Something that is counted while sandboxes exist. CPU is in thousandths here."""

    name: str
    words: str
    use: str
    limit: Callable[[Any], int | None]
    amount: Callable[[Wanted], int]
    shown: Callable[[int], float | int] = int


def cpu_milli(cpu: float) -> int:
    """Processors in thousandths."""
    return round(cpu * 1_000)


def _sandboxes_limit(row: Any) -> int | None:
    return None if row.sandboxes_max >= NO_LIMIT else int(row.sandboxes_max)


_DIMENSIONS = (
    _Dimension(
        name="sandboxes",
        words="sandboxes that are not paused",
        use="sandboxes",
        limit=_sandboxes_limit,
        amount=lambda wanted: 1,
    ),
    _Dimension(
        name="cpu",
        words="processors",
        use="cpu_milli",
        limit=lambda row: None if row.cpu_max is None else cpu_milli(row.cpu_max),
        amount=lambda wanted: cpu_milli(wanted.cpu),
        shown=lambda amount: amount / 1_000,
    ),
    _Dimension(
        name="memory_mb",
        words="MiB of memory",
        use="memory_mb",
        limit=lambda row: row.memory_mb_max,
        amount=lambda wanted: wanted.memory_mb,
    ),
    _Dimension(
        name="disk_mb",
        words="MiB of disk",
        use="disk_mb",
        limit=lambda row: row.disk_mb_max,
        amount=lambda wanted: wanted.disk_mb,
    ),
    _Dimension(
        name="gpu",
        words="GPUs",
        use="gpu",
        limit=lambda row: row.gpu_max,
        amount=lambda wanted: wanted.gpu,
    ),
)
_RUNNING = tuple(dimension for dimension in _DIMENSIONS if dimension.name != "disk_mb")
"""What a paused sandbox has given back."""

# Statements are built once: building them costs more than running them.
_LINE = (
    sa.select(
        PROJECTS.c.project_id,
        PROJECTS.c.name,
        PROJECTS.c.sandboxes_max,
        PROJECTS.c.cpu_max,
        PROJECTS.c.memory_mb_max,
        PROJECTS.c.disk_mb_max,
        PROJECTS.c.gpu_max,
        PROJECTS.c.egress_mb_max,
        PROJECTS.c.creates_per_s_max,
        PROJECTS.c.closed_at,
        PROJECT_USE.c.sandboxes,
        PROJECT_USE.c.cpu_milli,
        PROJECT_USE.c.memory_mb,
        PROJECT_USE.c.disk_mb,
        PROJECT_USE.c.gpu,
        PROJECT_USE.c.creates_due_at,
        PROJECT_USE.c.egress_day,
        PROJECT_USE.c.egress_bytes,
    )
    .select_from(PROJECT_LINES)
    .join(PROJECTS, PROJECTS.c.project_id == PROJECT_LINES.c.ancestor_id)
    .join(PROJECT_USE, PROJECT_USE.c.project_id == PROJECT_LINES.c.ancestor_id)
    .where(PROJECT_LINES.c.project_id == sa.bindparam("of_project"))
    # From the top down: transactions lock in this order.
    .order_by(PROJECTS.c.depth, PROJECTS.c.project_id)
)
_LINE_LOCKED = _LINE.with_for_update(of=PROJECT_USE)
_SET_DUE = (
    sa.update(PROJECT_USE)
    .where(PROJECT_USE.c.project_id == sa.bindparam("of_project"))
    .values(creates_due_at=sa.bindparam("due_at"))
)
_IN_LINE = sa.select(PROJECT_LINES.c.ancestor_id).where(
    PROJECT_LINES.c.project_id == sa.bindparam("of_project")
)
_NOTE_EGRESS = (
    sa.update(PROJECT_USE)
    .where(PROJECT_USE.c.project_id.in_(_IN_LINE))
    .values(
        egress_bytes=sa.case(
            (
                PROJECT_USE.c.egress_day == sa.bindparam("on_day"),
                PROJECT_USE.c.egress_bytes + sa.bindparam("more_bytes"),
            ),
            else_=sa.bindparam("more_bytes"),
        ),
        egress_day=sa.bindparam("on_day"),
    )
)


def wanted_of(record: SandboxRecord) -> Wanted:
    """What a sandbox takes."""
    return Wanted(
        cpu=record.cpu, memory_mb=record.memory_mb, disk_mb=record.disk_mb, gpu=record.gpu
    )


def admit(
    connection: sa.Connection, project_id: str, wanted: Sequence[Wanted], *, now: float
) -> Admitted:
    """How many of ``wanted``, in order, fit into the project and all projects above it.

    The caller inserts the records of exactly so many sandboxes in the same transaction. Creates
    of one project take turns: the rows of what it uses are locked until the transaction ends.

    Args:
        connection: Inside of a transaction that writes.
        project_id: Whose they will be.
        wanted: What each takes. An endless number fits where nothing is limited.
        now: Unix seconds.
    """
    line = line_of(connection, project_id)
    count, refusal = len(wanted), None
    # The nearest is the last. Another gateway may have closed it a moment ago.
    if line and line[-1].closed_at is not None:
        return Admitted(count=0, refusal=_closed(line[-1]))
    # Of several that refuse, the nearest is named.
    for row in reversed(line):
        fit, why = _fitting(row, wanted[:count], now)
        if fit < count:
            count, refusal = fit, why
    for row in line:
        if count and row.creates_per_s_max is not None:
            due_at = _due_at(row, now) + count / row.creates_per_s_max
            connection.execute(_SET_DUE, {"of_project": row.project_id, "due_at": due_at})
    return Admitted(count=count, refusal=refusal)


def admit_one(connection: sa.Connection, record: SandboxRecord) -> None:
    """Refuse a sandbox that does not fit.

    Raises:
        QuotaExceeded: names the limit, the use, and the project that set it.
    """
    admitted = admit(connection, record.project_id, [wanted_of(record)], now=record.created_at)
    if admitted.refusal is not None:
        raise admitted.refusal


def refuse_build(
    connection: sa.Connection, project_id: str, wanted: Wanted, *, now: float
) -> QuotaExceeded | None:
    """Why a build does not fit into its project and those above it. None: it does, and counts as
    soon as its row says that it is at work, in the same transaction.

    Args:
        connection: Inside of a transaction that writes.
        project_id: Whose it is.
        wanted: What it takes.
        now: Unix seconds.
    """
    for row in reversed(line_of(connection, project_id)):
        over = _sent_too_much(row, now)
        if over is not None:
            return over
        for dimension in _DIMENSIONS:
            amount, use = dimension.amount(wanted), getattr(row, dimension.use)
            limit = dimension.limit(row)
            if limit is not None and amount and use + amount > limit:
                return _refusal(row, dimension, limit, use, amount)
    return None


def line_of(connection: sa.Connection, project_id: str) -> Sequence[Any]:
    """A project and those above it, from the top down, with what they may use and do use.

    Inside of a transaction that writes: others that look there wait until it ends.
    """
    return connection.execute(_line_of(connection), {"of_project": project_id}).all()


def take_from(one: Any, line: Sequence[Any], more: Counter[tuple[str, str]]) -> None:
    """Note in ``more`` what a row of a sandbox takes while it runs, of each project in line."""
    for row in line:
        for dimension in _RUNNING:
            more[row.project_id, dimension.name] += dimension.amount(_wanted(one))


def no_place(one: Any, line: Sequence[Any], more: Counter[tuple[str, str]]) -> QuotaExceeded | None:
    """Why a paused sandbox finds no place in its projects, which hold ``more`` than they say. Of
    several that refuse, the nearest is named."""
    for row in reversed(line):
        for dimension in _RUNNING:
            amount = dimension.amount(_wanted(one))
            use = getattr(row, dimension.use) + more[row.project_id, dimension.name]
            limit = dimension.limit(row)
            if limit is not None and amount and use + amount > limit:
                return _refusal(row, dimension, limit, use, amount)
    return None


def note_egress(connection: sa.Connection, project_id: str, sent_bytes: int, *, now: float) -> None:
    """Add to what the sandboxes of a project have sent out of the node today (UTC)."""
    values = {
        "of_project": project_id,
        "more_bytes": max(0, sent_bytes),
        "on_day": int(now // DAY_S),
    }
    if connection.dialect.name != "sqlite":
        # In the order of all others, or two transactions could wait for each other.
        connection.execute(_LINE_LOCKED, {"of_project": project_id})
    connection.execute(_NOTE_EGRESS, values)


def _wanted(row: Any) -> Wanted:
    return Wanted(cpu=row.cpu, memory_mb=row.memory_mb, disk_mb=row.disk_mb, gpu=row.gpu)


def _line_of(connection: sa.Connection) -> sa.Select[Any]:
    # SQLite has one writer at a time.
    return _LINE if connection.dialect.name == "sqlite" else _LINE_LOCKED


def _fitting(row: Any, wanted: Sequence[Wanted], now: float) -> tuple[int, QuotaExceeded | None]:
    """How many fit into one project, and why the next does not."""
    count, refusal = _in_time(row, len(wanted), now)
    over = _sent_too_much(row, now)
    if over is not None:
        return 0, over
    for dimension in _DIMENSIONS:
        limit = dimension.limit(row)
        if limit is None:
            continue
        use = getattr(row, dimension.use)
        for index, one in enumerate(wanted[:count]):
            amount = dimension.amount(one)
            # What takes nothing of it is not held up by its being used up.
            if amount and use + amount > limit:
                count, refusal = index, _refusal(row, dimension, limit, use, amount)
                break
            use += amount
    return count, refusal


def _due_at(row: Any, now: float) -> float:
    """When the next create is due. What a clock that was set back left behind is forgotten."""
    due_at = float(row.creates_due_at)
    rate = row.creates_per_s_max
    # Batches may run ahead by one burst, and at least by one create.
    ahead_s = max(RATE_BURST_S, 1.0 / rate) * 2
    return max(due_at, now) if due_at <= now + ahead_s else now


def _in_time(row: Any, count: int, now: float) -> tuple[int, QuotaExceeded | None]:
    rate = row.creates_per_s_max
    if rate is None or count == 0:
        return count, None
    burst = max(1.0, rate * RATE_BURST_S)
    free = burst - (_due_at(row, now) - now) * rate
    fit = min(count, max(0, math.floor(free + 1e-9)))
    if fit == count:
        return count, None
    wait_s = (fit + 1 - free) / rate
    return fit, QuotaExceeded(
        f"project `{row.name}` ({row.project_id}) may create {rate:g} sandboxes per second, "
        "and has done so",
        remediation="Send the rest a little later, or ask for a higher quota.",
        details=_details(row, "creates_per_s", rate, rate, count, fits_never=False),
        retry_after_s=min(RATE_RETRY_S_MAX, max(1, math.ceil(wait_s))),
    )


def _refusal(row: Any, dimension: _Dimension, limit: int, use: int, amount: int) -> QuotaExceeded:
    shown = dimension.shown
    return QuotaExceeded(
        f"project `{row.name}` ({row.project_id}) has {shown(use):g} {dimension.words}, "
        f"and may have {shown(limit):g}: {shown(amount):g} more do not fit",
        details={
            **_details(
                row,
                dimension.name,
                shown(limit),
                shown(use),
                shown(amount),
                fits_never=amount > limit,
            ),
            **({"running": use} if dimension.name == "sandboxes" else {}),
        },
        retry_after_s=1,
    )


def _closed(row: Any) -> QuotaExceeded:
    return QuotaExceeded(
        f"project `{row.name}` ({row.project_id}) is closed",
        remediation="Use another project.",
        details=_details(row, "sandboxes", 0, 0, 1, fits_never=True),
    )


def _sent_too_much(row: Any, now: float) -> QuotaExceeded | None:
    if row.egress_mb_max is None or row.egress_day != int(now // DAY_S):
        return None
    used_mb = row.egress_bytes // MB
    if used_mb < row.egress_mb_max:
        return None
    return QuotaExceeded(
        f"project `{row.name}` ({row.project_id}) has sent {used_mb} MiB today, "
        f"and may send {row.egress_mb_max}",
        remediation="Wait until the day is over (UTC), or ask for a higher quota.",
        details=_details(row, "egress_mb", row.egress_mb_max, used_mb, 0, fits_never=False),
        retry_after_s=max(1, int(DAY_S - now % DAY_S)),
    )


def _details(
    row: Any,
    dimension: str,
    limit: float,
    use: float,
    wanted: float,
    *,
    fits_never: bool,
) -> dict[str, Any]:
    return {
        "dimension": dimension,
        "limit": limit,
        "use": use,
        "wanted": wanted,
        "project_id": row.project_id,
        "project": row.name,
        "fits_never": fits_never,
    }
