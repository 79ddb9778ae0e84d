# SPDX-License-Identifier: AGPL-3.0-only
"""Templates: registering them, and finding the one that a caller names."""

from __future__ import annotations

import re
import time

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Forbidden, InvalidRequest, TemplateNotFound
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.node import Backend
from opendsec_server.store import accounts, templates
from opendsec_server.store.records import Template, TemplateBuild
from opendsec_server.store.store import Store

from .iam import Caller

DEFAULT_TAG = "default"
TEMPLATE_ID_CHARS = 20
CACHE_TTL_S = 10.0
_REFERENCE_RE = re.compile(
    r"(?:(?P<scope>[a-z0-9_-]+)/)?(?P<name>[a-z0-9_-]+)(?::(?P<tag>[a-z0-9_.-]+))?"
)


class TemplateDefinition(msgspec.Struct, kw_only=True, frozen=True):
    """A template of the installation, open to every project."""

    name: str
    image: str
    cpu: float = limits.CPU_DEFAULT
    memory_mb: int = limits.MEMORY_MB_DEFAULT
    disk_mb: int = limits.DISK_MB_DEFAULT
    default_user: str = "user"
    default_workdir: str | None = None
    backend: Backend | None = None
    """The only backend that can start it. None: any that starts layers."""


class Reference(msgspec.Struct, kw_only=True, frozen=True):
    """How a caller names a template or snapshot: ``id``, ``name``, ``name:tag``, ``scope/name``."""

    scope: str | None
    """A project's id. None: the caller's, and the installation's templates."""
    name: str
    """Name or id."""
    tag: str | None


BASE_TEMPLATE = TemplateDefinition(name="base", image="base")


def parse_reference(text: str) -> Reference:
    """Take a reference apart.

    Raises:
        InvalidRequest: not a reference.
    """
    parts = _REFERENCE_RE.fullmatch(text[: limits.NAME_CHARS_MAX + 1])
    if parts is None or len(text) > limits.NAME_CHARS_MAX:
        raise InvalidRequest(
            f"template: `{text[:64]}` is not a template reference",
            remediation="Use the name or id of a template or snapshot: lower-case letters, "
            "digits, `-`, `_`.",
        )
    return Reference(scope=parts["scope"], name=parts["name"], tag=parts["tag"])


class Templates:
    """The templates that exist. Few and seldom changed, so they are kept in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._all: list[Template] = []
        self._read_at = float("-inf")

    async def register(self, definition: TemplateDefinition) -> Template:
        """Add a template of the installation, or bring it up to date."""
        now = time.time()
        template = await accounts.put_template(
            self._store,
            Template(
                template_id=random_chars(TEMPLATE_ID_CHARS),
                project_id=None,
                name=definition.name,
                image=definition.image,
                public=True,
                cpu=definition.cpu,
                memory_mb=definition.memory_mb,
                disk_mb=definition.disk_mb,
                default_user=definition.default_user,
                default_workdir=definition.default_workdir,
                created_at=now,
                updated_at=now,
                backend=definition.backend,
            ),
        )
        self._read_at = float("-inf")
        return template

    async def visible(self, caller: Caller) -> list[Template]:
        """The templates of the caller's project and of the installation, oldest first."""
        return [t for t in await self._templates() if t.project_id in (None, caller.project_id)]

    async def use(self) -> dict[str, tuple[int, float]]:
        """How often each template was used, and when last."""
        return await accounts.template_use(self._store)

    async def by_id(self, template_id: str) -> Template | None:
        """The template with this id, whoever owns it."""
        return next((t for t in await self._templates() if t.template_id == template_id), None)

    async def resolve(self, caller: Caller, reference: str) -> Template:
        """The template that ``id``, ``name``, ``name:tag`` or ``scope/name`` means.

        Raises:
            InvalidRequest: not a reference.
            TemplateNotFound: there is none of that name, or it is not the caller's.
        """
        wanted = parse_reference(reference)
        template = await self.find(caller, wanted)
        if template is None:
            raise TemplateNotFound(f"there is no template `{reference}`")
        return template

    async def own(self, caller: Caller, reference: str) -> Template:
        """The same, of the caller's project only: what may be changed.

        Raises:
            InvalidRequest: not a reference.
            TemplateNotFound: there is none of that name, or the caller may not see it.
            Forbidden: it belongs to the installation, or to another project that shows it.
        """
        template = await self.resolve(caller, reference)
        if template.project_id != caller.project_id:
            raise Forbidden(
                f"the template `{reference}` is not of this project",
                remediation="Build a template of your own from it.",
            )
        return template

    async def find(self, caller: Caller, wanted: Reference) -> Template | None:
        """The template that a reference means, if it is there and the caller may use it.

        A project's own come before those of the installation. Whether a project's template has
        the tag is asked of its builds: ``build_of``.
        """
        named = [
            t for t in await self._templates() if _means(wanted, t, caller) and _may_use(caller, t)
        ]
        named.sort(key=lambda t: (t.template_id != wanted.name, t.project_id is None))
        template = named[0] if named else None
        if template is None:
            return None
        if template.project_id is None and wanted.tag not in (None, DEFAULT_TAG):
            return None
        return template

    async def of_installation(self, wanted: Reference) -> Template | None:
        """The installation's template of a name, whether or not a project has one of that name."""
        if wanted.scope is not None or wanted.tag not in (None, DEFAULT_TAG):
            return None
        named = (
            t for t in await self._templates() if t.project_id is None and t.name == wanted.name
        )
        return next(named, None)

    async def build_of(self, template: Template, tag: str | None) -> TemplateBuild:
        """The ready build of a project's template that a tag means.

        Raises:
            TemplateNotFound: there is no build with this tag, or none is ready yet.
        """
        found = await templates.build_of_tag(self._store, template.template_id, tag or DEFAULT_TAG)
        if found is None:
            raise TemplateNotFound(
                f"the template `{template.name}` has no finished build with the tag "
                f"`{tag or DEFAULT_TAG}`",
                remediation="Wait until its build is ready, or give one of its tags.",
            )
        return found

    def forget(self) -> None:
        """Read them anew at the next question: something was changed."""
        self._read_at = float("-inf")

    async def _templates(self) -> list[Template]:
        now = time.monotonic()
        if now - self._read_at >= CACHE_TTL_S:
            self._all = await accounts.all_templates(self._store)
            self._read_at = now
        return self._all


def _means(wanted: Reference, template: Template, caller: Caller) -> bool:
    if wanted.name == template.template_id:
        return wanted.scope in (None, template.project_id)
    if wanted.name != template.name:
        return False
    if wanted.scope is None:
        return template.project_id in (None, caller.project_id)
    return wanted.scope == template.project_id


def _may_use(caller: Caller, template: Template) -> bool:
    return template.public or template.project_id in (None, caller.project_id)
