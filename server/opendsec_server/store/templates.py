# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on templates, their builds and tags, and the cache of build steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import BuildNotFound, Conflict, QuotaExceeded
from opendsec_server.contract.images import StartCommand

from .packing import plain, struct_of
from .quotas import Wanted, refuse_build
from .records import Template, TemplateBuild, TemplateTag
from .store import Store
from .tables import BUILD_STEPS, TEMPLATE_BUILDS, TEMPLATE_TAGS, TEMPLATES

_env = msgspec.json.Decoder(dict[str, str])
_tags = msgspec.json.Decoder(list[str])
_start = msgspec.json.Decoder(StartCommand)
_BUILD = TEMPLATE_BUILDS.c
_TAG = TEMPLATE_TAGS.c

ASKED_MAX = 1_000
ASKED_COUNTED_S = 24 * 3_600.0
"""Builds of a project that were asked for in this time and not started."""
STEPS_PRUNED_MAX = 1_000
"""Cached steps forgotten in one transaction."""


class BuildFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Which builds to list, newest first, and from where on."""

    template_id: str
    after: tuple[float, str] | None = None
    """``created_at`` and id of the last build of the page before."""
    limit: int


def _row_of(build: TemplateBuild) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.structs.asdict(build)
    row["tags"] = msgspec.json.encode(build.tags).decode()
    row["env"] = msgspec.json.encode(build.env).decode()
    row["start"] = None if build.start is None else msgspec.json.encode(build.start).decode()
    return row


def _build_of(row: sa.RowMapping) -> TemplateBuild:
    values = plain(row)
    values["tags"] = _tags.decode(values["tags"])
    values["env"] = _env.decode(values["env"])
    if values["start"] is not None:
        values["start"] = _start.decode(values["start"])
    return msgspec.convert(values, TemplateBuild)


# --- templates --------------------------------------------------------------


async def begin_build(store: Store, template: Template, build: TemplateBuild) -> TemplateBuild:
    """Record a build that is asked for; its template too if the project has none of that name.

    Args:
        store: Where.
        template: As it would be made.
        build: Its ``template_id`` is replaced by that of the template that is there.

    Returns:
        The build as recorded.

    Raises:
        QuotaExceeded: the project asked for ``ASKED_MAX`` in a day that it did not start.
    """

    def work(connection: sa.Connection) -> TemplateBuild:
        asked = connection.execute(
            sa.select(sa.func.count())
            .select_from(TEMPLATE_BUILDS)
            .where(
                _BUILD.project_id == build.project_id,
                _BUILD.state == "waiting",
                _BUILD.started_at.is_(None),
                _BUILD.created_at > build.created_at - ASKED_COUNTED_S,
            )
        ).scalar_one()
        if asked >= ASKED_MAX:
            raise QuotaExceeded(
                f"the project has asked for {asked} builds and not started them",
                remediation="Start or cancel them, or delete their templates.",
                retry_after_s=60,
            )
        query = sa.select(TEMPLATES.c.template_id).where(
            TEMPLATES.c.project_id == template.project_id, TEMPLATES.c.name == template.name
        )
        known = connection.execute(query).scalar()
        if known is None:
            connection.execute(sa.insert(TEMPLATES), msgspec.structs.asdict(template))
            known = template.template_id
        recorded = msgspec.structs.replace(build, template_id=known)
        connection.execute(sa.insert(TEMPLATE_BUILDS), _row_of(recorded))
        return recorded

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process made the template between our look and our insert.
        return await store.write(work)


async def set_public(store: Store, template_id: str, public: bool, now: float) -> bool:
    """Show a template to all projects, or to its own only. False: it is gone."""

    def work(connection: sa.Connection) -> bool:
        changed = connection.execute(
            sa.update(TEMPLATES)
            .where(TEMPLATES.c.template_id == template_id)
            .values(public=public, updated_at=now)
        )
        return bool(changed.rowcount)

    return await store.write(work)


async def delete_template(store: Store, template_id: str) -> list[str] | None:
    """Remove a template with its builds and tags; the ids of its builds. None: there was none."""

    def work(connection: sa.Connection) -> list[str] | None:
        builds = connection.execute(
            sa.select(_BUILD.build_id).where(_BUILD.template_id == template_id)
        ).scalars()
        found = list(builds)
        connection.execute(sa.delete(TEMPLATE_TAGS).where(_TAG.template_id == template_id))
        connection.execute(sa.delete(TEMPLATE_BUILDS).where(_BUILD.template_id == template_id))
        removed = connection.execute(
            sa.delete(TEMPLATES).where(TEMPLATES.c.template_id == template_id)
        )
        return found if removed.rowcount else None

    return await store.write(work)


# --- builds -----------------------------------------------------------------


async def get_build(store: Store, build_id: str) -> TemplateBuild | None:
    """One build, whatever its state."""

    def work(connection: sa.Connection) -> TemplateBuild | None:
        query = sa.select(TEMPLATE_BUILDS).where(_BUILD.build_id == build_id)
        row = connection.execute(query).mappings().first()
        return None if row is None else _build_of(row)

    return await store.read(work)


async def list_builds(store: Store, wanted: BuildFilter) -> list[TemplateBuild]:
    """At most ``wanted.limit`` builds of a template, newest first."""
    query = sa.select(TEMPLATE_BUILDS).where(_BUILD.template_id == wanted.template_id)
    if wanted.after is not None:
        last = sa.tuple_(sa.literal(wanted.after[0], sa.Double), sa.literal(wanted.after[1]))
        query = query.where(sa.tuple_(_BUILD.created_at, _BUILD.build_id) < last)
    query = query.order_by(_BUILD.created_at.desc(), _BUILD.build_id.desc()).limit(wanted.limit)

    def work(connection: sa.Connection) -> list[TemplateBuild]:
        return [_build_of(row) for row in connection.execute(query).mappings().all()]

    return await store.read(work)


async def builds_shown(
    store: Store, template_ids: Sequence[str], tag: str
) -> dict[str, tuple[TemplateBuild, int]]:
    """For each template that was built: the build to show, and how many there are.

    Shown is the one that ``tag`` means, else the newest.
    """
    if not template_ids:
        return {}

    def work(connection: sa.Connection) -> dict[str, tuple[TemplateBuild, int]]:
        query = (
            sa.select(TEMPLATE_BUILDS, _TAG.tag.label("meant"))
            .outerjoin(
                TEMPLATE_TAGS,
                sa.and_(
                    _TAG.template_id == _BUILD.template_id,
                    _TAG.build_id == _BUILD.build_id,
                    _TAG.tag == tag,
                ),
            )
            .where(_BUILD.template_id.in_(template_ids))
            .order_by(_BUILD.created_at, _BUILD.build_id)
        )
        found: dict[str, tuple[TemplateBuild, int]] = {}
        meant: dict[str, TemplateBuild] = {}
        for row in connection.execute(query).mappings():
            values = dict(row)
            is_meant = values.pop("meant") is not None
            build = _build_of(values)  # type: ignore[arg-type]
            count = found[build.template_id][1] if build.template_id in found else 0
            if is_meant:
                meant[build.template_id] = build
            found[build.template_id] = (meant.get(build.template_id, build), count + 1)
        return found

    return await store.read(work)


async def start_build(
    store: Store, project_id: str, build_id: str, now: float, unfinished_max: int
) -> None:
    """Note that everything for a build is there.

    Raises:
        BuildNotFound: it is gone.
        Conflict: it was started before.
        QuotaExceeded: the project has ``unfinished_max`` builds under way.
    """

    def work(connection: sa.Connection) -> None:
        query = sa.select(_BUILD.state, _BUILD.started_at).where(_BUILD.build_id == build_id)
        row = connection.execute(query).first()
        if row is None:
            raise BuildNotFound("there is no such build")
        if row.state != "waiting" or row.started_at is not None:
            raise Conflict(
                "this build was started before",
                remediation="Ask for a new build of the template.",
            )
        under_way = connection.execute(
            sa.select(sa.func.count())
            .select_from(TEMPLATE_BUILDS)
            .where(
                _BUILD.project_id == project_id,
                _BUILD.state.in_(("waiting", "building")),
                _BUILD.started_at.is_not(None),
            )
        ).scalar_one()
        if under_way >= unfinished_max:
            raise QuotaExceeded(
                f"the project has {under_way} builds under way, and may have {unfinished_max}",
                remediation="Wait until one has ended, or cancel one.",
                retry_after_s=10,
            )
        connection.execute(
            sa.update(TEMPLATE_BUILDS).where(_BUILD.build_id == build_id).values(started_at=now)
        )

    await store.write(work)


async def note_building(store: Store, build_id: str, now: float) -> bool:
    """Note that a build runs; it counts in its project's use until it has ended. False: it is
    gone, or has ended.

    Raises:
        QuotaExceeded: the project's quota has no room for it. It goes on waiting.
    """
    query = sa.select(_BUILD.project_id, _BUILD.cpu, _BUILD.memory_mb, _BUILD.disk_mb).where(
        _BUILD.build_id == build_id, _BUILD.state == "waiting"
    )

    def work(connection: sa.Connection) -> bool:
        # Its row first and then projects, as all who end builds do.
        locked = query if connection.dialect.name == "sqlite" else query.with_for_update()
        row = connection.execute(locked).first()
        if row is None:
            return False
        wanted = Wanted(cpu=row.cpu, memory_mb=row.memory_mb, disk_mb=row.disk_mb)
        refusal = refuse_build(connection, row.project_id, wanted, now=now)
        if refusal is not None:
            raise refusal
        connection.execute(
            sa.update(TEMPLATE_BUILDS).where(_BUILD.build_id == build_id).values(state="building")
        )
        return True

    return await store.write(work)


async def finish_build(store: Store, build: TemplateBuild) -> bool:
    """Record that a build is ready, and let its tags mean it. False: it is gone.

    Tags go to the build that is finished last. What the default tag means is shown of the
    template itself.
    """

    def work(connection: sa.Connection) -> bool:
        changed = connection.execute(
            sa.update(TEMPLATE_BUILDS)
            .where(_BUILD.build_id == build.build_id, _BUILD.state.in_(("waiting", "building")))
            .values(_row_of(build))
        )
        if not changed.rowcount:
            return False
        for tag in build.tags:
            _point(connection, build, tag, build.finished_at or 0.0)
        connection.execute(
            sa.update(TEMPLATES)
            .where(TEMPLATES.c.template_id == build.template_id)
            .values(updated_at=build.finished_at)
        )
        return True

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process gave a tag to its own build at the same moment.
        return await store.write(work)


async def fail_build(
    store: Store, build_id: str, *, code: str, message: str, step: str | None, now: float
) -> bool:
    """Record that a build has failed. False: it is gone, or had ended."""

    def work(connection: sa.Connection) -> bool:
        changed = connection.execute(
            sa.update(TEMPLATE_BUILDS)
            .where(_BUILD.build_id == build_id, _BUILD.state.in_(("waiting", "building")))
            .values(state="error", error_code=code, error=message, error_step=step, finished_at=now)
        )
        return bool(changed.rowcount)

    return await store.write(work)


async def fail_interrupted(
    store: Store, *, code: str, message: str, now: float, waiting_since: float
) -> int:
    """At a start: builds that were under way have failed, and those whose files never came."""

    def work(connection: sa.Connection) -> int:
        changed = connection.execute(
            sa.update(TEMPLATE_BUILDS)
            .where(
                _BUILD.state.in_(("waiting", "building")),
                sa.or_(_BUILD.started_at.is_not(None), _BUILD.created_at < waiting_since),
            )
            .values(state="error", error_code=code, error=message, finished_at=now)
        )
        return int(changed.rowcount)

    return await store.write(work)


async def images_of_builds(store: Store) -> set[str]:
    """Digests of the images that ready builds stand on."""

    def work(connection: sa.Connection) -> set[str]:
        query = sa.select(_BUILD.image).where(_BUILD.image.is_not(None)).distinct()
        return set(connection.execute(query).scalars())

    return await store.read(work)


# --- tags -------------------------------------------------------------------


async def build_of_tag(store: Store, template_id: str, tag: str) -> TemplateBuild | None:
    """The ready build that a tag means."""

    def work(connection: sa.Connection) -> TemplateBuild | None:
        query = (
            sa.select(TEMPLATE_BUILDS)
            .join(TEMPLATE_TAGS, _TAG.build_id == _BUILD.build_id)
            .where(_TAG.template_id == template_id, _TAG.tag == tag)
        )
        row = connection.execute(query).mappings().first()
        return None if row is None else _build_of(row)

    return await store.read(work)


async def tags_of(store: Store, template_id: str) -> list[TemplateTag]:
    """The tags of a template, newest first."""

    def work(connection: sa.Connection) -> list[TemplateTag]:
        query = (
            sa.select(TEMPLATE_TAGS)
            .where(_TAG.template_id == template_id)
            .order_by(_TAG.created_at.desc(), _TAG.tag)
        )
        return [struct_of(row, TemplateTag) for row in connection.execute(query).mappings().all()]

    return await store.read(work)


async def assign_tags(store: Store, build: TemplateBuild, tags: Sequence[str], now: float) -> None:
    """Let tags mean a build.

    Raises:
        BuildNotFound: it was deleted meanwhile.
    """

    def work(connection: sa.Connection) -> None:
        for tag in tags:
            _point(connection, build, tag, now)

    try:
        await store.write(work)
    except sa.exc.IntegrityError as exc:
        raise BuildNotFound("the build was deleted meanwhile") from exc


async def remove_tags(store: Store, template_id: str, tags: Sequence[str]) -> int:
    """Remove tags; how many there were."""

    def work(connection: sa.Connection) -> int:
        removed = connection.execute(
            sa.delete(TEMPLATE_TAGS).where(_TAG.template_id == template_id, _TAG.tag.in_(tags))
        )
        return int(removed.rowcount)

    return await store.write(work)


def _point(connection: sa.Connection, build: TemplateBuild, tag: str, now: float) -> None:
    place = sa.and_(_TAG.template_id == build.template_id, _TAG.tag == tag)
    changed = connection.execute(
        sa.update(TEMPLATE_TAGS).where(place).values(build_id=build.build_id, created_at=now)
    )
    if not changed.rowcount:
        connection.execute(
            sa.insert(TEMPLATE_TAGS),
            {
                "template_id": build.template_id,
                "tag": tag,
                "build_id": build.build_id,
                "created_at": now,
            },
        )


# --- cached steps -----------------------------------------------------------


async def cached_step(store: Store, project_id: str, key: str, now: float) -> str | None:
    """Digest of the image that a step made before, and note its use."""
    place = sa.and_(BUILD_STEPS.c.project_id == project_id, BUILD_STEPS.c.key == key)

    def work(connection: sa.Connection) -> str | None:
        image: str | None = connection.execute(sa.select(BUILD_STEPS.c.image).where(place)).scalar()
        if image is not None:
            connection.execute(sa.update(BUILD_STEPS).where(place).values(last_used_at=now))
        return image

    return await store.write(work)


async def put_step(store: Store, project_id: str, key: str, image: str, now: float) -> None:
    """Remember what a step made, instead of what it made before."""
    place = sa.and_(BUILD_STEPS.c.project_id == project_id, BUILD_STEPS.c.key == key)

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.delete(BUILD_STEPS).where(place))
        connection.execute(
            sa.insert(BUILD_STEPS),
            {
                "project_id": project_id,
                "key": key,
                "image": image,
                "created_at": now,
                "last_used_at": now,
            },
        )

    await store.write(work)


async def forget_steps(store: Store, used_before: float) -> int:
    """Forget steps that were not used for long; at ``STEPS_PRUNED_MAX``, call again."""
    old = (
        sa.select(BUILD_STEPS.c.project_id, BUILD_STEPS.c.key)
        .where(BUILD_STEPS.c.last_used_at < used_before)
        .limit(STEPS_PRUNED_MAX)
    )

    def work(connection: sa.Connection) -> int:
        rows = connection.execute(old).all()
        for row in rows:
            connection.execute(
                sa.delete(BUILD_STEPS).where(
                    BUILD_STEPS.c.project_id == row.project_id, BUILD_STEPS.c.key == row.key
                )
            )
        return len(rows)

    return await store.write(work)
