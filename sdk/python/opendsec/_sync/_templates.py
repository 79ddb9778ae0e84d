# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_templates.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Templates: what sandboxes are created from, and how they are built."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import httpx2
import msgspec

from opendsec import _context, _limits, _network
from opendsec._answers import from_native
from opendsec._errors import (
    BadResponse,
    BuildFailed,
    ConnectionFailed,
    InvalidRequest,
    NotFound,
    TemplateNotFound,
)
from opendsec._models import (
    Build,
    BuildLogEntry,
    BuildStep,
    TemplateDetail,
    TemplateInfo,
)
from opendsec._ready_made import READY_MADE
from opendsec._retry import Repeat

from ._concurrency import Listener, chunks, in_thread, sleep, tell
from ._transport import Transport, origin

LogCallback = Listener[BuildLogEntry]
"""Called with each line of a build's log."""

SILENCE_MAX_S = 60.0
"""The server sends something more often than this while a log is followed."""
FOLLOW_AGAIN_S = 0.5
FOLLOW_TRIES_MAX = 20
_UPLOAD_CHUNK_BYTES = 1 << 20


class _Templates(msgspec.Struct):
    templates: list[TemplateInfo] = []


class _Upload(msgspec.Struct):
    present: bool
    url: str


class _Pushed(msgspec.Struct):
    digest: str


class _Line(msgspec.Struct):
    """A line of a log, or its last one."""

    at: Any = None
    build: Build | None = None


class _Nothing(msgspec.Struct):
    pass


class Templates:
    """The templates that the key's project can use. ``build`` makes one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __call__(self) -> builtins.list[TemplateInfo]:
        """As ``list()``."""
        return self.list()

    def list(self) -> builtins.list[TemplateInfo]:
        """The project's templates and those of the installation, oldest first."""
        return (self._transport.api("GET", "/v1/templates", _Templates)).templates

    def get(self, name: str) -> TemplateDetail:
        """One template, by its name or id, with its tags and newest builds.

        Raises:
            TemplateNotFound: there is none.
        """
        return self._transport.api("GET", _path(name), TemplateDetail)

    def delete(self, name: str) -> bool:
        """Remove a template and its builds; False if there is none. Sandboxes of it go on."""
        try:
            self._transport.api("DELETE", _path(name), _Nothing)
        except TemplateNotFound:
            return False
        return True

    def set_public(self, name: str, public: bool) -> None:
        """Let every project use a template, or no longer.

        Raises:
            TemplateNotFound: there is none.
            Forbidden: it is another project's.
        """
        self._transport.api("PATCH", _path(name), _Nothing, body={"public": public})

    def assign_tags(self, name: str, tags: Sequence[str]) -> Build:
        """Let tags mean the build that ``name`` (``name:tag``) means.

        Raises:
            TemplateNotFound: there is none, or it has no such build.
        """
        body = {"tags": [*tags]}
        return self._transport.api("POST", f"{_path(name)}/tags", Build, body=body)

    def remove_tag(self, name: str, tag: str) -> bool:
        """Take a tag away; False if the template has none such. The build stays.

        Raises:
            InvalidRequest: the tag ``default``, which stays.
        """
        if not tag:
            raise InvalidRequest("The tag is empty.")
        path = f"{_path(name)}/tags/{quote(tag, safe='')}"
        try:
            self._transport.api("DELETE", path, _Nothing)
        except NotFound:
            return False
        return True

    def push(
        self,
        name: str,
        reference: str,
        *,
        username: str | None = None,
        password: str | None = None,
    ) -> str:
        """Send a template's image to a registry; the digest of its manifest there.

        Raises:
            TemplateNotFound: there is none, or it has no such build.
            RegistryDenied, RegistryLimited, RegistryUnavailable: as the registry says.
        """
        body = {"reference": reference, "registry_auth": _login(username, password)}
        reply = self._transport.api(
            "POST", f"{_path(name)}/push", _Pushed, body=body, timeout_s=_limits.PULL_TIMEOUT_S
        )
        return reply.digest

    # --- builds -------------------------------------------------------------

    def build(
        self,
        name: str,
        *,
        dockerfile: str | None = None,
        context: str | Path | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        from_image: str | None = None,
        from_template: str | None = None,
        steps: Sequence[BuildStep] = (),
        tags: Sequence[str] = (),
        cpu: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        start_command: str | None = None,
        start_image: bool = False,
        ready_command: str | None = None,
        force: bool = False,
        username: str | None = None,
        password: str | None = None,
        on_log: LogCallback | None = None,
    ) -> Build:
        """Build a template and return when it is ready.

        Args:
            name: ``name`` or ``name:tag``. The template is made if there is none.
            dockerfile: The text of a Dockerfile. Or a base and ``steps``:
            context: Directory that ``COPY`` copies from; its ``.dockerignore`` counts.
            build_args: Values for ``ARG``.
            target: The last stage to build.
            from_image: An image to begin with.
            from_template: A template to begin with.
            steps: What to do with it.
            tags: Further tags.
            cpu: Cores of its sandboxes. None: the server's default.
            memory_mb: Their memory in MiB.
            disk_mb: Their writable disk in MiB.
            start_command: Runs in every sandbox of the template, and is waited for.
            start_image: The image's ENTRYPOINT and CMD are the start command.
            ready_command: Exits with 0 when the start command is up.
            force: Use no results of earlier builds.
            username: For the registries of its base images.
            password: Likewise. Not kept.
            on_log: Called with each line of the log.

        Raises:
            BuildFailed: a step failed; the message has its command, exit code and last output,
                ``details["step"]`` its number.
            InvalidRequest: the Dockerfile cannot be read; ``details["line"]`` names the line.
            QuotaExceeded: the project has too many builds under way.
        """
        build = self.start_build(
            name,
            dockerfile=dockerfile,
            context=context,
            build_args=build_args,
            target=target,
            from_image=from_image,
            from_template=from_template,
            steps=steps,
            tags=tags,
            cpu=cpu,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            start_command=start_command,
            start_image=start_image,
            ready_command=ready_command,
            force=force,
            username=username,
            password=password,
        )
        return self.wait(build.build_id, on_log=on_log)

    def start_build(
        self,
        name: str,
        *,
        dockerfile: str | None = None,
        context: str | Path | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        from_image: str | None = None,
        from_template: str | None = None,
        steps: Sequence[BuildStep] = (),
        tags: Sequence[str] = (),
        cpu: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        start_command: str | None = None,
        start_image: bool = False,
        ready_command: str | None = None,
        force: bool = False,
        username: str | None = None,
        password: str | None = None,
    ) -> Build:
        """As ``build``, but return when it is under way. ``wait`` waits for it."""
        body = {
            "name": name,
            "tags": [*tags],
            "cpu": cpu,
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
        }
        build = self._transport.api("POST", "/v1/builds", Build, body=body, repeat=Repeat.IF_UNSENT)
        path = _build_path(build.build_id)
        files = None
        if context is not None:
            files = self._send_context(path, Path(context))
        start = {
            "dockerfile": dockerfile,
            "context": files if dockerfile is not None else None,
            "build_args": dict(build_args or {}),
            "target": target,
            "from_image": from_image,
            "from_template": from_template,
            "steps": [_step(step, files) for step in steps],
            "start_command": start_command,
            "start_image": start_image,
            "ready_command": ready_command,
            "force": force,
            "registry_auth": _login(username, password),
        }
        self._transport.api("POST", f"{path}/start", _Nothing, body=start, repeat=Repeat.IF_UNSENT)
        return build

    def _send_context(self, build_path: str, directory: Path) -> str:
        packed = in_thread(lambda: _context.pack_context(directory))
        with packed.content:
            where = self._transport.api("GET", f"{build_path}/files/{packed.sha256}", _Upload)
            if not where.present:
                self._put(where.url, packed.content, packed.size_bytes)
        return packed.sha256

    def _put(self, url: str, content: IO[bytes], size_bytes: int) -> None:
        def make() -> httpx2.Request:
            content.seek(0)
            return self._transport.http.build_request(
                "PUT",
                url,
                content=chunks(content, _UPLOAD_CHUNK_BYTES),
                headers={"Content-Length": str(size_bytes)},
                timeout=_network.timeout(_limits.PULL_TIMEOUT_S),
            )

        self._transport.exchange(make, repeat=Repeat.IDEMPOTENT)

    def make(self, name: str, *, force: bool = False, on_log: LogCallback | None = None) -> Build:
        """Build a ready-made template of that name: one of ``READY_MADE``.

        Args:
            name: ``python``, ``node`` or ``code-interpreter-v1``.
            force: Use no results of earlier builds: newer packages come in.
            on_log: Called with each line of the log.

        Raises:
            TemplateNotFound: there is no such recipe.
            BuildFailed: a step failed; most often the archive of its packages was not reached.
            QuotaExceeded: the project has too many builds under way.
        """
        recipe = READY_MADE.get(name)
        if recipe is None:
            raise TemplateNotFound(
                f"There is no ready-made template {name}.",
                remediation=f"There are: {', '.join(READY_MADE)}.",
            )
        return self.build(
            name,
            from_template="base",
            context=recipe.files,
            steps=recipe.steps,
            memory_mb=recipe.memory_mb,
            start_command=recipe.start_command,
            ready_command=recipe.ready_command,
            force=force,
            on_log=on_log,
        )

    def build_info(self, build_id: str) -> Build:
        """A build as it stands.

        Raises:
            BuildNotFound: there is none.
        """
        return self._transport.api("GET", _build_path(build_id), Build)

    def cancel_build(self, build_id: str) -> None:
        """End a build; returns when nothing of it runs.

        Raises:
            BuildNotFound: there is none.
            Conflict: it has ended.
        """
        self._transport.api(
            "POST",
            f"{_build_path(build_id)}/cancel",
            _Nothing,
            timeout_s=_limits.PULL_TIMEOUT_S,
        )

    def logs(self, build_id: str, *, offset: int = 0) -> Iterator[BuildLogEntry]:
        """The log of a build, live; ends when the build has ended.

        A broken connection is made anew, and goes on where it was.

        Args:
            build_id: Which.
            offset: How many entries to leave out.

        Raises:
            BuildNotFound: there is none.
        """
        tries = 0
        while True:
            try:
                lines = self._lines(build_id, offset)
                for entry in lines:
                    if entry is None:
                        return
                    offset += 1
                    tries = 0
                    yield entry
            except ConnectionFailed:
                tries += 1
                if tries >= FOLLOW_TRIES_MAX:
                    raise
            sleep(FOLLOW_AGAIN_S)

    def _lines(self, build_id: str, offset: int) -> Iterator[BuildLogEntry | None]:
        """Entries of one connection; None at the end of the log."""
        settings = self._transport.settings

        def make() -> httpx2.Request:
            return self._transport.http.build_request(
                "GET",
                f"{settings.base_url}{_build_path(build_id)}/logs",
                params={"offset": offset},
                headers=settings.key_headers(),
                timeout=_network.timeout(SILENCE_MAX_S),
            )

        response = self._transport.open(make, repeat=Repeat.IDEMPOTENT)
        try:
            for line in response.iter_lines():
                if not line.strip():
                    continue
                yield _entry(line, response)
        except httpx2.HTTPError as exc:
            raise _network.connection_failed(exc, origin(response.request)) from exc
        finally:
            response.close()

    def wait(self, build_id: str, *, on_log: LogCallback | None = None) -> Build:
        """Wait until a build is ready.

        Raises:
            BuildFailed: it failed by what a step did.
            OpendsecError: it failed by something else, typed as the server says.
        """
        for entry in self.logs(build_id):
            if on_log is not None:
                tell(on_log, entry)
        build = self.build_info(build_id)
        while not build.ended:
            sleep(FOLLOW_AGAIN_S)
            build = self.build_info(build_id)
        if build.error is not None:
            raise _failure(build)
        return build


def _entry(line: str, response: httpx2.Response) -> BuildLogEntry | None:
    try:
        if msgspec.json.decode(line, type=_Line).build is not None:
            return None
        return msgspec.json.decode(line, type=BuildLogEntry)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadResponse(f"The log of {origin(response.request)} cannot be read: {exc}") from exc


def _failure(build: Build) -> Exception:
    assert build.error is not None
    details = {"step": build.error.step, "build_id": build.build_id}
    error = from_native(
        {"code": build.error.code, "message": build.error.message, "details": details}
    )
    if error.code in ("build_cancelled", "build_interrupted"):
        failed = BuildFailed(error.message, details=details)
        failed.code = error.code
        return failed
    return error


def _step(step: BuildStep, files: str | None) -> dict[str, Any]:
    return {
        "type": step.type,
        "args": [*step.args],
        "force": step.force,
        "files": files if step.type == "COPY" else None,
    }


def _login(username: str | None, password: str | None) -> dict[str, str] | None:
    if username is None and password is None:
        return None
    return {"username": username or "", "password": password or ""}


def _path(name: str) -> str:
    """Its path; the name is quoted, so that a bad one cannot name another path."""
    if not name:
        raise InvalidRequest("The template's name is empty.")
    return f"/v1/templates/{quote(name, safe='')}"


def _build_path(build_id: str) -> str:
    if not build_id:
        raise InvalidRequest("The build's id is empty.")
    return f"/v1/builds/{quote(build_id, safe='')}"
