# SPDX-License-Identifier: AGPL-3.0-only
"""Builds of templates: asked for, queued, run, cancelled, read, and tidied up after."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import structlog

from opendsec_server.config import Config
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    BuildFailed,
    BuildNotFound,
    Conflict,
    Forbidden,
    Internal,
    InvalidRequest,
    NodeFull,
    OpendsecError,
    QuotaExceeded,
    TemplateNotFound,
)
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.images import RegistryAuth
from opendsec_server.contract.node import SandboxStatus
from opendsec_server.control.iam import Caller
from opendsec_server.control.image_access import ImageAccess
from opendsec_server.control.nodes import Fleet
from opendsec_server.control.snapshots import Origin, Snapshots
from opendsec_server.control.templates import (
    DEFAULT_TAG,
    TEMPLATE_ID_CHARS,
    Reference,
    Templates,
    parse_reference,
)
from opendsec_server.control.tokens import TokenMint
from opendsec_server.store import templates as store_templates
from opendsec_server.store.records import Template, TemplateBuild, TemplateTag
from opendsec_server.store.store import Store
from opendsec_server.store.templates import BuildFilter

from .logs import BuildLog, BuildLogs, LogEntry
from .plan import BuildPlan, check_plan
from .runner import Failure, Runner, StepLocks, Tools
from .sandboxes import Builders
from .turns import Turns
from .uploads import Uploads

log = structlog.get_logger(__name__)

INTERRUPTED = "build_interrupted"
CANCELLED = "build_cancelled"
MB = 1_048_576
STOP_WAIT_S = 10.0
QUOTA_LOOK_S = 2.0
"""How often a build looks whether its project's quota has room for it."""
FILES_AWAITED_S = 24 * 3_600.0
"""A build that is asked for and not started is given up after this time."""
STEPS_KEPT_S = 30 * 24 * 3_600.0
"""Results of steps that were not used for this long are forgotten."""
TIDY_INTERVAL_S = 3_600.0
_TAG_RE = re.compile(r"[a-z0-9_.-]{1,128}")


class BuildRequest(msgspec.Struct, kw_only=True, frozen=True):
    """What is asked for before files are sent."""

    name: str
    """``name``, ``name:tag`` or ``project/name:tag``."""
    envd_version: str
    """Of the protocol that the template's sandboxes will speak."""
    tags: tuple[str, ...] = ()
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None


class Shown(msgspec.Struct, kw_only=True, frozen=True):
    """A template as it is listed."""

    template: Template
    build: TemplateBuild | None
    """The one that the default tag means, else the newest. None: of the installation."""
    builds: int


class BuildPage(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a template's builds."""

    builds: list[TemplateBuild]
    more: bool


class _Job:
    """A build under way in this process."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.cancelled = False
        self.runner: Runner | None = None


class Builds:
    """The builds of all projects."""

    def __init__(
        self,
        *,
        config: Config,
        store: Store,
        fleet: Fleet,
        access: ImageAccess,
        mint: TokenMint,
        templates: Templates,
        snapshots: Snapshots,
    ) -> None:
        self._config = config
        self._store = store
        self._node = fleet
        self._templates = templates
        self._snapshots = snapshots
        directory = Path(config.state_dir) / "builds"
        self.logs = BuildLogs(directory / "logs")
        self.uploads = Uploads(
            directory / "files",
            config.build_upload_max_mb * MB,
            config.build_uploads_max_mb * MB,
        )
        self._builders = Builders(config=config, fleet=fleet, mint=mint)
        self._tools = Tools(
            store=store,
            node=fleet,
            access=access,
            builders=self._builders,
            uploads=self.uploads,
            locks=StepLocks(),
        )
        self._turns = Turns(config.builds_parallel_max)
        self._refused: dict[str, float] = {}
        """Builds that the quota had no room for; since when (monotonic)."""
        self._jobs: dict[str, _Job] = {}
        self._tidying: asyncio.Task[None] | None = None

    async def start_up(self) -> None:
        """Settle what a server that was killed left. Its sandboxes go at the next comparison.

        Raises:
            StoreUnavailable: nothing was settled.
        """
        now = time.time()
        count = await store_templates.fail_interrupted(
            self._store,
            code=INTERRUPTED,
            message="the server was restarted; build again: what was done is kept",
            now=now,
            waiting_since=now - FILES_AWAITED_S,
        )
        if count:
            log.warning("builds were interrupted", count=count)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.uploads.sweep, drafts=True)
        self._tidying = asyncio.create_task(self._tidy(), name="builds-tidy")

    async def stop(self) -> None:
        """End what is under way. Its sandboxes are removed, its builds have failed."""
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_WAIT_S)

    def is_orphan(self, status: SandboxStatus) -> bool:
        """Whether a sandbox on the node is a builder that nobody needs any more."""
        return self._builders.is_builder(status) and not self._builders.owned(status.sandbox_id)

    def is_builder(self, status: SandboxStatus) -> bool:
        """Whether a sandbox on the node was made for a build."""
        return self._builders.is_builder(status)

    async def images_in_use(self) -> set[str]:
        """Digests that templates and running builds stand on: no prune may take them."""
        found = await store_templates.images_of_builds(self._store)
        for job in self._jobs.values():
            if job.runner is not None:
                found |= job.runner.images
        return found

    # --- asking for builds --------------------------------------------------

    async def request(self, caller: Caller, wanted: BuildRequest) -> tuple[Template, TemplateBuild]:
        """Record a build that is to come, and its template if there is none of that name.

        Raises:
            InvalidRequest: name, tags or sizes are not allowed.
            Forbidden: the name is of another project.
            Conflict: a snapshot has this name.
            QuotaExceeded: too many were asked for and not started.
        """
        reference = own_name(caller, wanted.name)
        tags = check_tags([*([reference.tag] if reference.tag else []), *wanted.tags])
        _check_sizes(wanted)
        snapshot = await self._snapshots.find(
            caller, Reference(scope=None, name=reference.name, tag=None)
        )
        if snapshot is not None:
            raise Conflict(
                f"name: there is a snapshot `{reference.name}`", remediation="Choose another name."
            )
        now = time.time()
        build = TemplateBuild(
            build_id=str(uuid.uuid4()),
            template_id="",
            project_id=caller.project_id,
            state="waiting",
            tags=tags or [DEFAULT_TAG],
            cpu=limits.CPU_DEFAULT if wanted.cpu is None else wanted.cpu,
            memory_mb=limits.MEMORY_MB_DEFAULT if wanted.memory_mb is None else wanted.memory_mb,
            disk_mb=max(limits.DISK_MB_DEFAULT, wanted.disk_mb or 0),
            envd_version=wanted.envd_version,
            created_at=now,
        )
        template = Template(
            template_id=random_chars(TEMPLATE_ID_CHARS),
            project_id=caller.project_id,
            name=reference.name,
            image="",
            public=False,
            cpu=build.cpu,
            memory_mb=build.memory_mb,
            disk_mb=build.disk_mb,
            default_user="user",
            default_workdir=None,
            created_at=now,
            updated_at=now,
        )
        build = await store_templates.begin_build(self._store, template, build)
        self._templates.forget()
        known = await self._templates.by_id(build.template_id)
        if known is None:
            raise TemplateNotFound("the template was deleted meanwhile")
        return known, build

    async def start(self, caller: Caller, build: TemplateBuild, plan: BuildPlan) -> None:
        """Begin a build, or let it wait for its turn. Returns at once.

        A plan that cannot work makes a failed build, as a failing step does: the caller reads why
        where it reads everything about the build.

        Raises:
            InvalidRequest: the plan has no base, or is too long.
            BuildNotFound, Conflict: it was deleted, or started before.
            QuotaExceeded: the project has too many under way.
            NodeFull: no room for its log.
        """
        failure: BuildFailed | None = None
        try:
            check_plan(plan)
        except BuildFailed as exc:
            failure = exc
        await store_templates.start_build(
            self._store,
            caller.project_id,
            build.build_id,
            time.time(),
            self._config.project_builds_max,
        )
        try:
            build_log = self.logs.open(build.build_id)
        except OSError as exc:
            full = NodeFull(f"the log of the build cannot be written: {exc.strerror}")
            await self._note_failed(build, full.code, full.message, None)
            raise full from exc
        if plan.auth is not None:
            build_log.hide([plan.auth.password])
        if failure is not None:
            step = str(failure.details.get("step", "base"))
            await self._fail(build, build_log, Failure(step, failure))
            self.logs.close(build.build_id)
            return
        task = asyncio.create_task(
            self._run(caller, build, plan, build_log), name=f"build-{build.build_id}"
        )
        self._jobs[build.build_id] = _Job(task)
        task.add_done_callback(lambda _: self._jobs.pop(build.build_id, None))

    async def cancel(self, build_id: str) -> None:
        """End a build that waits or runs; returns when nothing of it runs.

        Raises:
            Conflict: it has ended.
        """
        job = self._jobs.get(build_id)
        if job is not None:
            job.cancelled = True
            job.task.cancel()
            await asyncio.wait({job.task})
            return
        ended = await store_templates.fail_build(
            self._store,
            build_id,
            code=CANCELLED,
            message="the build was cancelled",
            step=None,
            now=time.time(),
        )
        if not ended:
            raise Conflict("the build has ended")

    # --- one build ----------------------------------------------------------

    async def _run(
        self, caller: Caller, build: TemplateBuild, plan: BuildPlan, build_log: BuildLog
    ) -> None:
        try:
            # What others use has no event to wait for.
            while not await self._run_if_it_fits(  # noqa: ASYNC110
                caller, build, plan, build_log
            ):
                await asyncio.sleep(QUOTA_LOOK_S)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._note_cancelled(build, build_log)))
            raise
        except Failure as failure:
            await self._fail(build, build_log, failure)
        except OpendsecError as exc:
            await self._fail(build, build_log, Failure("base", exc))
        except Exception:
            log.exception("a build failed unexpectedly", build_id=build.build_id)
            defect = Internal("the build failed because of a defect of the server")
            await self._fail(build, build_log, Failure("base", defect))
        finally:
            self._refused.pop(build.build_id, None)
            self.logs.close(build.build_id)

    async def _run_if_it_fits(
        self, caller: Caller, build: TemplateBuild, plan: BuildPlan, build_log: BuildLog
    ) -> bool:
        """Run a build when it is its project's turn. False: the project's quota has no room for it
        now; it holds up nobody else.

        Raises:
            QuotaExceeded: there never is, or there was none for as long as a build may take.
        """
        name = build.build_id
        async with self._turns.turn(build.project_id):
            try:
                if not await store_templates.note_building(self._store, name, time.time()):
                    return True
            except QuotaExceeded as exc:
                now = time.monotonic()
                if name not in self._refused:
                    build_log.write(f"the build waits: {exc.message}")
                waited_s = now - self._refused.setdefault(name, now)
                if exc.details.get("fits_never") or waited_s >= self._config.build_timeout_s:
                    raise
                return False
            await self._run_now(caller, build, plan, build_log)
            return True

    async def _run_now(
        self, caller: Caller, build: TemplateBuild, plan: BuildPlan, build_log: BuildLog
    ) -> None:
        async def origin_of(reference: str) -> Origin:
            async with self._snapshots.using(caller, reference) as origin:
                return origin

        end_at = time.time() + self._config.build_timeout_s
        runner = Runner(self._tools, build, plan, build_log, origin_of=origin_of, end_at=end_at)
        job = self._jobs.get(build.build_id)
        if job is not None:
            job.runner = runner
        log.info("build begins", build_id=build.build_id, template_id=build.template_id)
        try:
            async with asyncio.timeout(self._config.build_timeout_s):
                result = await runner.run()
        except TimeoutError:
            raise Failure(
                runner.step,
                BuildFailed(
                    f"the build took longer than {self._config.build_timeout_s} s",
                    remediation="Make it shorter, build again (what was done is kept), or ask for "
                    "a higher build_timeout_s.",
                ),
            ) from None
        shape = result.shape
        now = time.time()
        ready = msgspec.structs.replace(
            build,
            state="ready",
            image=shape.image,
            default_user=shape.user,
            default_workdir=shape.workdir,
            env=shape.env,
            start=result.start,
            started_at=now if build.started_at is None else build.started_at,
            finished_at=now,
        )
        if await store_templates.finish_build(self._store, ready):
            self._templates.forget()
            # Before the node's next clean-up: nothing else stands on the image yet.
            await self._node.images.keep(sorted(await self.images_in_use()))
            build_log.write("the template is ready", step="finalize")
            log.info("build ready", build_id=build.build_id, image=shape.image)

    async def _fail(self, build: TemplateBuild, build_log: BuildLog, failure: Failure) -> None:
        error = failure.error
        message = build_log.clean(error.message)
        build_log.write(message, level="error", step=failure.step)
        log.info("build failed", build_id=build.build_id, step=failure.step, code=error.code)
        await self._note_failed(build, error.code, message, failure.step)

    async def _note_cancelled(self, build: TemplateBuild, build_log: BuildLog) -> None:
        job = self._jobs.get(build.build_id)
        by_caller = job is not None and job.cancelled
        message = "the build was cancelled" if by_caller else "the server was stopped; build again"
        build_log.write(message, level="error")
        await self._note_failed(build, CANCELLED if by_caller else INTERRUPTED, message, None)

    async def _note_failed(
        self, build: TemplateBuild, code: str, message: str, step: str | None
    ) -> None:
        try:
            await store_templates.fail_build(
                self._store,
                build.build_id,
                code=code,
                message=message,
                step=step,
                now=time.time(),
            )
        except OpendsecError as exc:
            # Found as interrupted at the next start.
            log.warning("a failed build is not recorded", build_id=build.build_id, why=exc.message)

    # --- reading ------------------------------------------------------------

    async def get(self, caller: Caller, template: Template, build_id: str) -> TemplateBuild:
        """A build of a template of the caller's project.

        Raises:
            BuildNotFound: there is none.
        """
        build = await self.by_id(caller, build_id)
        if build.template_id != template.template_id:
            raise BuildNotFound(f"the template `{template.name}` has no such build")
        return build

    async def by_id(self, caller: Caller, build_id: str) -> TemplateBuild:
        """A build of the caller's project.

        Raises:
            BuildNotFound: there is none.
        """
        build = await store_templates.get_build(self._store, build_id[:64])
        if build is None or build.project_id != caller.project_id:
            raise BuildNotFound("there is no such build")
        return build

    async def page(self, wanted: BuildFilter) -> BuildPage:
        """One page of a template's builds, newest first."""
        one_more = msgspec.structs.replace(wanted, limit=wanted.limit + 1)
        rows = await store_templates.list_builds(self._store, one_more)
        return BuildPage(builds=rows[: wanted.limit], more=len(rows) > wanted.limit)

    async def shown(self, templates: Sequence[Template]) -> list[Shown]:
        """Templates with the build that each is shown by."""
        own = [t.template_id for t in templates if t.project_id is not None]
        found = await store_templates.builds_shown(self._store, own, DEFAULT_TAG)
        return [
            Shown(
                template=template,
                build=found[template.template_id][0] if template.template_id in found else None,
                builds=found[template.template_id][1] if template.template_id in found else 0,
            )
            for template in templates
        ]

    async def follow(self, build_id: str, offset: int) -> AsyncIterator[LogEntry]:
        """Log entries from ``offset`` on; ends when the build has ended."""
        live = self.logs.live(build_id)
        if live is not None:
            async for entry in live.follow(offset):
                yield entry
            return
        for entry in (await self.logs.read(build_id))[offset:]:
            yield entry

    # --- changing -----------------------------------------------------------

    async def delete(self, caller: Caller, reference: str) -> None:
        """Remove a template with its builds. Sandboxes of it go on; its images go when nothing
        needs them and images are pruned.

        Raises:
            InvalidRequest, TemplateNotFound, Forbidden: as ``Templates.own``.
        """
        template = await self._templates.own(caller, reference)
        found = await store_templates.delete_template(self._store, template.template_id)
        self._templates.forget()
        if found is None:
            raise TemplateNotFound(f"there is no template `{reference[:64]}`")
        for build_id in found:
            job = self._jobs.get(build_id)
            if job is not None:
                job.cancelled = True
                job.task.cancel()
                await asyncio.wait({job.task})
            with contextlib.suppress(OSError):
                self.logs.remove(build_id)
        log.info("template deleted", template_id=template.template_id, builds=len(found))

    async def set_public(self, caller: Caller, reference: str, public: bool) -> Template:
        """Show a template to all projects, or no longer.

        Raises:
            InvalidRequest, TemplateNotFound, Forbidden: as ``Templates.own``.
        """
        template = await self._templates.own(caller, reference)
        await store_templates.set_public(self._store, template.template_id, public, time.time())
        self._templates.forget()
        return msgspec.structs.replace(template, public=public)

    async def tags(self, template: Template) -> list[TemplateTag]:
        """The tags of a template, newest first."""
        return await store_templates.tags_of(self._store, template.template_id)

    async def assign_tags(
        self, caller: Caller, target: str, tags: Sequence[str]
    ) -> tuple[TemplateBuild, list[str]]:
        """Let tags mean the build that ``target`` (``name:tag``) means.

        Raises:
            InvalidRequest: a tag is not allowed, or none is given.
            TemplateNotFound, Forbidden: the target is not the caller's.
            BuildNotFound: it was deleted meanwhile.
        """
        checked = check_tags(tags)
        if not checked:
            raise InvalidRequest("tags: at least one is needed")
        reference = parse_reference(target)
        template = await self._templates.own(caller, target)
        build = await self._templates.build_of(template, reference.tag)
        await store_templates.assign_tags(self._store, build, checked, time.time())
        return build, checked

    async def remove_tags(self, caller: Caller, name: str, tags: Sequence[str]) -> None:
        """Take tags away. The builds stay.

        Raises:
            InvalidRequest: the default tag, or one that is not allowed.
            TemplateNotFound, Forbidden: the template is not the caller's, or has none of the tags.
        """
        checked = check_tags(tags)
        if DEFAULT_TAG in checked:
            raise InvalidRequest(
                f"tags: the tag `{DEFAULT_TAG}` cannot be removed",
                remediation="Give it to another build, or delete the template.",
            )
        template = await self._templates.own(caller, name)
        removed = await store_templates.remove_tags(self._store, template.template_id, checked)
        if checked and not removed:
            raise TemplateNotFound(f"the template `{template.name}` has none of these tags")

    async def push(
        self, caller: Caller, name: str, reference: str, *, auth: RegistryAuth | None
    ) -> str:
        """Send the image of the build that ``name`` or ``name:tag`` means to a registry; the
        digest of its manifest there.

        Raises:
            TemplateNotFound, Forbidden: the template is not the caller's.
            As ``NodeImages.push``.
        """
        template = await self._templates.own(caller, name)
        build = await self._templates.build_of(template, parse_reference(name).tag)
        assert build.image is not None, "only ready builds have tags"
        return await self._node.images.push(build.image, reference, auth=auth)

    # --- tidying ------------------------------------------------------------

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_INTERVAL_S)
            try:
                await asyncio.to_thread(self.uploads.sweep)
                oldest = time.time() - STEPS_KEPT_S
                count = store_templates.STEPS_PRUNED_MAX
                while count >= store_templates.STEPS_PRUNED_MAX:
                    count = await store_templates.forget_steps(self._store, oldest)
            except (OSError, OpendsecError) as exc:
                log.warning("builds not tidied", why=str(exc))


def own_name(caller: Caller, text: str) -> Reference:
    """The name of a template that the caller builds.

    Raises:
        InvalidRequest: not a name, or too long.
        Forbidden: it is of another project.
    """
    reference = parse_reference(text.strip().lower())
    if len(reference.name) > limits.TEMPLATE_NAME_CHARS_MAX:
        raise InvalidRequest(f"name: at most {limits.TEMPLATE_NAME_CHARS_MAX} characters")
    if reference.scope not in (None, caller.project_id):
        raise Forbidden(
            f"name: `{reference.scope}` is not this project",
            remediation="Leave the part before `/` out.",
        )
    return reference


def check_tags(tags: Sequence[str]) -> list[str]:
    """Tags without repetitions.

    Raises:
        InvalidRequest: one is not a tag, or there are too many.
    """
    if len(tags) > limits.TEMPLATE_TAGS_MAX:
        raise InvalidRequest(f"tags: at most {limits.TEMPLATE_TAGS_MAX}")
    cleaned = list(dict.fromkeys(tag.strip().lower() for tag in tags))
    for tag in cleaned:
        if _TAG_RE.fullmatch(tag) is None:
            raise InvalidRequest(
                f"tags: `{tag[:64]}` is not a tag",
                remediation="Use 1 to 128 lower-case letters, digits, `.`, `-`, `_`.",
            )
    return cleaned


def _check_sizes(wanted: BuildRequest) -> None:
    for field, value, least, most in (
        ("cpu", wanted.cpu, limits.CPU_MIN, limits.CPU_MAX),
        ("memory_mb", wanted.memory_mb, limits.MEMORY_MB_MIN, limits.MEMORY_MB_MAX),
        ("disk_mb", wanted.disk_mb, 0, limits.DISK_MB_MAX),
    ):
        if value is not None and not least <= value <= most:
            raise InvalidRequest(f"{field}: {least} to {most}")
