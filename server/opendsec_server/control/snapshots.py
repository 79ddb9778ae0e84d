# SPDX-License-Identifier: AGPL-3.0-only
"""The snapshots that exist: finding, using and deleting them. ``saving`` makes them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import msgspec
import structlog

from opendsec_server.contract.errors import (
    InvalidRequest,
    OpendsecError,
    SnapshotNotFound,
    TemplateNotFound,
)
from opendsec_server.contract.ids import is_snapshot_id
from opendsec_server.contract.images import StartCommand
from opendsec_server.contract.node import Backend, NodeClient, StateMode
from opendsec_server.store import snapshots
from opendsec_server.store.records import Snapshot, Template, TemplateBuild
from opendsec_server.store.snapshots import SnapshotFilter
from opendsec_server.store.store import Store

from .iam import Caller
from .templates import DEFAULT_TAG, Reference, Templates, parse_reference

log = structlog.get_logger(__name__)

HALF_MADE_KEPT_S = 600.0
"""No node takes longer to save a sandbox."""


class Origin(msgspec.Struct, kw_only=True, frozen=True):
    """What a sandbox starts from, template or snapshot."""

    template_id: str
    name: str
    image: str
    cpu: float
    memory_mb: int
    disk_mb: int
    default_user: str
    default_workdir: str | None
    backend: Backend | None
    """The only one that can start it. None: any."""
    snapshot_id: str | None = None
    node_id: str | None = None
    """The node that holds the snapshot, and so gets what starts from it. None: any."""
    mode: StateMode | None = None
    env: dict[str, str] = {}
    """Below the caller's."""
    start: StartCommand | None = None
    """Started with the sandbox and awaited."""


class SnapshotPage(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a list."""

    snapshots: list[Snapshot]
    more: bool


class Snapshots:
    """Finds, lends and removes snapshots."""

    def __init__(self, store: Store, node: NodeClient, templates: Templates) -> None:
        self._store = store
        self._node = node
        self._templates = templates
        self._users: Counter[str] = Counter()
        """Creates under way, by the snapshot that they start from."""
        self._freed: dict[str, asyncio.Event] = {}
        """Set when the last of its users is done."""
        self._removals: set[asyncio.Task[None]] = set()

    # --- finding ------------------------------------------------------------

    async def get(self, caller: Caller, reference: str) -> Snapshot:
        """The snapshot that ``id``, ``id:tag``, ``name``, ``name:tag`` or ``scope/name`` means.

        Raises:
            SnapshotNotFound: not one of the caller's, or no reference at all.
        """
        found = None
        with contextlib.suppress(InvalidRequest):
            found = await self.find(caller, parse_reference(reference))
        if found is None:
            raise SnapshotNotFound(f"there is no snapshot `{reference[:64]}`")
        return found

    async def find(self, caller: Caller, wanted: Reference) -> Snapshot | None:
        """The caller's snapshot that a reference means, if it is there."""
        if wanted.scope not in (None, caller.project_id):
            return None
        if is_snapshot_id(wanted.name):
            found = await snapshots.get_snapshot(self._store, wanted.name)
            if (
                found is not None
                and found.project_id == caller.project_id
                and found.state == "ready"
                and not found.ephemeral
                and wanted.tag in (None, DEFAULT_TAG, found.tag)
            ):
                return found
        rows = await snapshots.list_snapshots(
            self._store,
            SnapshotFilter(
                project_id=caller.project_id,
                name=wanted.name,
                tag=wanted.tag or DEFAULT_TAG,
                limit=2,
            ),
        )
        return next((row for row in rows if row.name == wanted.name), None)

    async def page(self, wanted: SnapshotFilter) -> SnapshotPage:
        """One page of a project's snapshots, newest first."""
        one_more = msgspec.structs.replace(wanted, limit=wanted.limit + 1)
        rows = await snapshots.list_snapshots(self._store, one_more)
        return SnapshotPage(snapshots=rows[: wanted.limit], more=len(rows) > wanted.limit)

    async def template_to_list(self, caller: Caller, reference: str | None) -> str | None:
        """The template or snapshot id that a list of sandboxes is filtered by. None: no filter.

        An unknown one makes an empty list, not an error: its id matches nothing.

        Raises:
            InvalidRequest: not a reference.
        """
        if reference is None:
            return None
        wanted = parse_reference(reference)
        template = await self._templates.find(caller, wanted)
        if template is not None:
            return template.template_id
        snapshot = await self.find(caller, wanted)
        return "" if snapshot is None else snapshot.snapshot_id

    # --- using --------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def using(self, caller: Caller, reference: str) -> AsyncIterator[Origin]:
        """What a create starts from. A snapshot is not removed while it is lent.

        Raises:
            InvalidRequest: not a reference.
            TemplateNotFound: no template or snapshot of that name, or it is not the caller's.
        """
        wanted = parse_reference(reference)
        template = await self._templates.find(caller, wanted)
        if template is not None:
            yield await self._of_found(template, wanted)
            return
        snapshot = await self.find(caller, wanted)
        if snapshot is None:
            raise TemplateNotFound(f"there is no template or snapshot `{reference}`")
        name = snapshot.snapshot_id
        with self._lent(name):
            # Looked at again: from here on a deletion waits for us.
            current = await snapshots.get_snapshot(self._store, name)
            if current is None or current.state != "ready":
                raise TemplateNotFound(f"the snapshot `{reference}` was deleted")
            yield _of_snapshot(current)

    async def _of_found(self, template: Template, wanted: Reference) -> Origin:
        if template.project_id is None:
            return _of_template(template)
        try:
            return _of_build(template, await self._templates.build_of(template, wanted.tag))
        except TemplateNotFound:
            # A build that failed, or is not done, changes nothing: a name of the installation
            # means what it meant before.
            before = await self._templates.of_installation(wanted)
            if before is None:
                raise
            return _of_template(before)

    @contextlib.contextmanager
    def _lent(self, snapshot_id: str) -> Iterator[None]:
        self._users[snapshot_id] += 1
        freed = self._freed.setdefault(snapshot_id, asyncio.Event())
        try:
            yield
        finally:
            self._users[snapshot_id] -= 1
            if not self._users[snapshot_id]:
                del self._users[snapshot_id], self._freed[snapshot_id]
                freed.set()

    # --- deleting -----------------------------------------------------------

    async def delete(self, caller: Caller, reference: str) -> None:
        """Nobody finds it from now on. Sandboxes started from it go on; creates under way end
        first, then its files are removed.

        Raises:
            SnapshotNotFound: not one of the caller's.
        """
        found = await self.get(caller, reference)
        if not await snapshots.mark_deleting(self._store, found.snapshot_id):
            raise SnapshotNotFound(f"there is no snapshot `{reference[:64]}`")
        log.info("snapshot deleted", snapshot_id=found.snapshot_id)
        task = asyncio.create_task(self._remove_or_log(found.snapshot_id), name="snapshot-remove")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        if not self.in_use(found.snapshot_id):
            await asyncio.shield(task)

    def in_use(self, snapshot_id: str) -> bool:
        """Whether a create that starts from it is under way in this process."""
        return snapshot_id in self._users

    async def remove(self, snapshot_id: str) -> None:
        """Remove what the node holds of it, then its row.

        Raises:
            NodeUnavailable, StoreUnavailable: it must be tried again.
        """
        await self._node.delete_snapshot(snapshot_id)
        await snapshots.drop_snapshot(self._store, snapshot_id)

    async def remove_half_made(self, row: Snapshot) -> None:
        """As ``remove``, for one that the node may still be making for a caller that is gone: its
        row stays until it was seen and removed, or cannot come any more.

        Raises:
            NodeUnavailable, StoreUnavailable: it must be tried again.
        """
        await snapshots.give_up(self._store, row.snapshot_id)
        found = await self._node.delete_snapshot(row.snapshot_id)
        if found or time.time() - row.created_at > HALF_MADE_KEPT_S:
            await snapshots.drop_snapshot(self._store, row.snapshot_id)

    async def stop(self) -> None:
        """End removals under way. They are done at the next start."""
        for task in self._removals:
            task.cancel()
        await asyncio.gather(*self._removals, return_exceptions=True)

    async def _remove_or_log(self, snapshot_id: str) -> None:
        """Never raises: what is not removed now is at the next comparison."""
        last = self._freed.get(snapshot_id)
        if last is not None:
            await last.wait()
        try:
            await self.remove(snapshot_id)
        except OpendsecError as exc:
            log.warning("snapshot removed later", snapshot_id=snapshot_id, why=exc.message)
        except Exception:
            log.exception("snapshot removed later", snapshot_id=snapshot_id)


def _of_template(template: Template) -> Origin:
    return Origin(
        template_id=template.template_id,
        name=template.name,
        image=template.image,
        cpu=template.cpu,
        memory_mb=template.memory_mb,
        disk_mb=template.disk_mb,
        default_user=template.default_user,
        default_workdir=template.default_workdir,
        backend=template.backend,
    )


def _of_build(template: Template, build: TemplateBuild) -> Origin:
    assert build.image is not None, "only ready builds have tags"
    return Origin(
        template_id=template.template_id,
        name=template.name,
        image=build.image,
        cpu=build.cpu,
        memory_mb=build.memory_mb,
        disk_mb=build.disk_mb,
        default_user=build.default_user or "root",
        default_workdir=build.default_workdir,
        backend=None,
        env=build.env,
        start=build.start,
    )


def _of_snapshot(snapshot: Snapshot) -> Origin:
    return Origin(
        template_id=snapshot.snapshot_id,
        name=full_name(snapshot) or snapshot.snapshot_id,
        image=snapshot.image,
        cpu=snapshot.cpu,
        memory_mb=snapshot.memory_mb,
        disk_mb=snapshot.disk_mb,
        default_user=snapshot.default_user,
        default_workdir=snapshot.default_workdir,
        backend=snapshot.backend,
        snapshot_id=snapshot.snapshot_id,
        node_id=snapshot.node_id,
        mode=snapshot.mode,
    )


def full_name(snapshot: Snapshot) -> str | None:
    """``name:tag``. None: it has no name."""
    return None if snapshot.name is None else f"{snapshot.name}:{snapshot.tag}"
