# SPDX-License-Identifier: AGPL-3.0-only
"""All services of the control plane, put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from opendsec_server.config import Config
from opendsec_server.contract.errors import OpendsecError, StoreUnavailable
from opendsec_server.contract.node import NodeClient
from opendsec_server.store import sandboxes
from opendsec_server.store.store import Store

from .audit import AUDIT_HEAD_FILE, Audit
from .backends import Backends
from .batches import Batches, seat_of
from .builds.service import Builds
from .bulk import Bulk
from .creates import Creates
from .functions.service import Functions
from .groups import Groups
from .groups.runner import Tools as GroupTools
from .iam import Iam, Principals, Projects, Tokens
from .image_access import ImageAccess
from .images import Images
from .invalidations import Invalidations
from .ledger import Ledger
from .lifecycle import Lifecycle
from .metrics import ControlMetrics
from .nodes import Fleet
from .nodes.service import Nodes
from .origins import Origins
from .packing import Packing
from .routes import Routes
from .saving import Saving
from .snapshots import Snapshots
from .task_deadlines import TaskDeadlines
from .tasks import Tasks
from .tasks.ends import Ends
from .tasks.keeper import TaskKeeper
from .tasks.operations import Operations
from .tasks.work import Work
from .templates import BASE_TEMPLATE, TemplateDefinition, Templates
from .tokens import TokenMint, load_secret
from .trajectories import Trajectories
from .watch import Watcher

ReadyCheck = Callable[[], Awaitable[None]]
"""Raises ``OpendsecError`` while the thing is not ready."""


class Services:
    """What the APIs stand on. Made by ``start``, ended by ``stop``."""

    def __init__(
        self,
        config: Config,
        store: Store,
        fleet: Fleet,
        mint: TokenMint,
        ready_checks: Mapping[str, ReadyCheck],
    ) -> None:
        self.config = config
        self.store = store
        self.fleet = fleet
        node = self.node = fleet
        self.mint = mint
        self.metrics = ControlMetrics()
        self.invalidations = Invalidations()
        self.closing = asyncio.Event()
        """Set when the server begins to stop: answers that would go on for long end."""
        self.iam = Iam(store)
        self.projects = Projects(store, self.iam)
        self.principals = Principals(store, self.iam, self.projects)
        self.tokens = Tokens(store, self.iam, self.projects)
        self.audit = Audit(
            store, self.iam, mint.audit_secret(), config.state_path / AUDIT_HEAD_FILE
        )
        self.templates = Templates(store)
        self.snapshots = Snapshots(store, node, self.templates)
        self.backends = Backends(config, fleet)
        access = ImageAccess(config, store, node, self.iam)
        self.builds = Builds(
            config=config,
            store=store,
            fleet=fleet,
            access=access,
            mint=mint,
            templates=self.templates,
            snapshots=self.snapshots,
        )
        ledger = Ledger(store, self.invalidations, self.metrics)
        self.images = Images(
            node, self.iam, access, self.templates, lambda: self.builds.images_in_use()
        )
        origins = Origins(node, self.templates, self.snapshots, self.images, access)
        deadlines = TaskDeadlines()
        self.creates = Creates(
            store=store,
            fleet=fleet,
            mint=mint,
            templates=self.templates,
            origins=origins,
            backends=self.backends,
            ledger=ledger,
            metrics=self.metrics,
            deadlines=deadlines,
            alone=config.role != "gateway",
        )
        self.batches = Batches(
            store=store,
            fleet=fleet,
            creates=self.creates,
            origins=origins,
            ledger=ledger,
            seat=seat_of(config),
        )
        self.lifecycle = Lifecycle(
            store=store,
            node=node,
            creates=self.creates,
            ledger=ledger,
            invalidations=self.invalidations,
            metrics=self.metrics,
            deadlines=deadlines,
        )
        self.bulk = Bulk(store=store, node=node, lifecycle=self.lifecycle, ledger=ledger)
        self.saving = Saving(
            store=store,
            node=node,
            creates=self.creates,
            lifecycle=self.lifecycle,
            templates=self.templates,
            snapshots=self.snapshots,
            backends=self.backends,
            metrics=self.metrics,
        )
        operations = Operations(
            store,
            Work(
                store=store,
                node=node,
                creates=self.creates,
                lifecycle=self.lifecycle,
                ledger=ledger,
                invalidations=self.invalidations,
                metrics=self.metrics,
            ),
        )
        ends = Ends(store, node, deadlines)
        self.tasks = Tasks(store, node, operations, ends, deadlines)
        self.task_keeper = TaskKeeper(store, self.tasks, operations, ends, deadlines)
        self.groups = Groups(
            GroupTools(
                store=store,
                fleet=fleet,
                creates=self.creates,
                origins=origins,
                lifecycle=self.lifecycle,
                ledger=ledger,
            ),
            seat=seat_of(config),
        )
        self.packing = Packing(node, self.lifecycle, self.metrics)
        self.trajectories = Trajectories(
            store=store,
            node=node,
            lifecycle=self.lifecycle,
            saving=self.saving,
            seat=seat_of(config),
        )
        self.functions = Functions(config=config, store=store, node=node, creates=self.creates)
        self.routes = Routes(store=store, node=node, lifecycle=self.lifecycle, mint=mint)
        self.watcher = Watcher(
            store=store,
            fleet=fleet,
            node_lost_after_s=config.node_lost_after_s,
            creates=self.creates,
            saving=self.saving,
            builds=self.builds,
            templates=self.templates,
            ledger=ledger,
            invalidations=self.invalidations,
        )
        self.nodes = Nodes(fleet, self.iam, self.watcher.forget_node)
        self._ready_checks = dict(ready_checks)

    @classmethod
    async def start(
        cls,
        config: Config,
        node: NodeClient,
        *,
        templates: Sequence[TemplateDefinition] = (BASE_TEMPLATE,),
        ready_checks: Mapping[str, ReadyCheck] | None = None,
    ) -> Services:
        """Open the store, make secret and first key if missing, and get in step with the node.

        Args:
            config: Settings.
            node: The node that runs the sandboxes, or a ``Fleet`` of several.
            templates: Templates of the installation, registered by name.
            ready_checks: What else must be ready, by name, for ``/readyz``.

        Raises:
            ConfigError: the store, the secret or the key file cannot be used. Nothing was
                overwritten.
        """
        mint = TokenMint(load_secret(config.state_path / "secret"))
        fleet = node if isinstance(node, Fleet) else Fleet.of_one(node)
        async with contextlib.AsyncExitStack() as begun:
            store = await Store.open(config)
            begun.push_async_callback(store.close)
            begun.push_async_callback(fleet.stop)
            await fleet.start()
            services = cls(config, store, fleet, mint, ready_checks or {})
            # Whichever of them fails: those that began before it are ended. Store and fleet are
            # left to them from here on.
            begun.pop_all()
            begun.push_async_callback(services.stop)
            await services.iam.ensure_first_key(config.api_key_file)
            for definition in templates:
                await services.templates.register(definition)
            await services.builds.start_up()
            await services.images.start()
            # Before the watcher settles what is left half-way: theirs goes on.
            await services.batches.start()
            await services.groups.start()
            await services.functions.start()
            await services.watcher.start()
            await services.trajectories.start()
            await services.task_keeper.start()
            services.audit.start()
            begun.pop_all()
        return services

    async def stop(self) -> None:
        """Finish what is under way and close the store. Sandboxes go on running. Each part is
        ended, also when another one cannot be, and when it has not begun."""
        self.closing.set()
        self.invalidations.close()
        parts = (
            self.groups.stop,
            self.functions.stop,
            self.batches.stop,
            self.bulk.stop,
            self.task_keeper.stop,
            self.trajectories.stop,
            self.builds.stop,
            self.saving.stop,
            self.packing.stop,
            self.images.stop,
            self.lifecycle.stop,
            self.creates.stop,
            self.snapshots.stop,
            self.watcher.stop,
            self.fleet.stop,
            self.audit.stop,
            self.store.close,
        )
        async with contextlib.AsyncExitStack() as ends:
            for end in reversed(parts):
                ends.push_async_callback(end)

    async def not_ready(self) -> list[str]:
        """Why the server cannot serve now, one sentence each; empty when it can."""
        checks: dict[str, ReadyCheck] = {
            "store": self.store.ping,
            "node": self._ping_node,
            **self._ready_checks,
        }
        reasons = []
        for name, check in checks.items():
            try:
                await check()
            except OpendsecError as exc:
                reasons.append(f"{name}: {exc.message}")
        return reasons

    async def render_metrics(self) -> bytes:
        """Figures for Prometheus. Counts of sandboxes are left out while the store is down."""
        self.metrics.set_nodes(Counter(m.standing.health for m in self.fleet.members))
        waiting, starting = self.batches.load()
        self.metrics.set_batch_items(waiting=waiting, starting=starting)
        try:
            self.metrics.set_sandboxes(await sandboxes.count_live(self.store))
            self.metrics.store_up.set(1)
        except StoreUnavailable:
            self.metrics.set_sandboxes({})
            self.metrics.store_up.set(0)
        return self.metrics.render()

    async def _ping_node(self) -> None:
        await self.node.info()
