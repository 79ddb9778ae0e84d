# SPDX-License-Identifier: AGPL-3.0-only
"""What a build is told to do, and the checks that need nothing but the words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import BuildFailed, InvalidRequest
from opendsec_server.contract.images import RegistryAuth

STEP_TYPES = ("COPY", "RUN", "ENV", "WORKDIR", "USER", "ARG")
DOCKERFILE_TYPES = (*STEP_TYPES, "LABEL", "EXPOSE", "STOPSIGNAL", "CMD", "ENTRYPOINT")
FILES_HASH_RE = re.compile(r"[0-9a-f]{64}")
_MODE_RE = re.compile(r"0?o?[0-7]{1,4}")
_OWNER_RE = re.compile(r"[A-Za-z0-9_.$-]{1,64}(:[A-Za-z0-9_.$-]{1,64})?")
_VARIABLE_RE = re.compile(r"[^=\0]+")

Style = Literal["e2b", "dockerfile"]
"""How steps are meant. ``e2b``: as `user` in its home, in a login shell of bash if there is one.
``dockerfile``: as the image says, by ``/bin/sh``."""


class BuildStep(msgspec.Struct, kw_only=True, frozen=True):
    """One step. ``args`` by type:

    ``COPY`` source, target, owner, mode (octal); ``RUN`` command, user; ``ENV`` and ``ARG`` name
    and value, over and over; ``WORKDIR`` path; ``USER`` name. Of a Dockerfile the words
    are as written: variables and quotes are resolved when the step's turn comes.
    """

    type: str
    args: tuple[str, ...] = ()
    files_hash: str | None = None
    """Of ``COPY``: which archive was sent for it."""
    from_stage: str | None = None
    """Of ``COPY``: the stage it copies from, in place of an archive."""
    force: bool = False
    """Run it, and all that follows, even if its result is known."""
    line: int | None = None
    """Where it stands in a Dockerfile."""
    more_sources: tuple[str, ...] = ()
    """Of ``COPY``: further ones."""


class Stage(msgspec.Struct, kw_only=True, frozen=True):
    """A base and steps on it."""

    name: str
    from_image: str | None = None
    from_template: str | None = None
    from_stage: str | None = None
    """None of the three: an empty image (``FROM scratch``)."""
    steps: tuple[BuildStep, ...] = ()


class BuildPlan(msgspec.Struct, kw_only=True, frozen=True):
    """A whole build. The last stage makes the template."""

    stages: tuple[Stage, ...]
    style: Style = "e2b"
    auth: RegistryAuth | None = None
    """For the registries of its base images."""
    force: bool = False
    start_cmd: str | None = None
    ready_cmd: str | None = None
    start_image: bool = False
    """Instead of ``start_cmd``: the image's ENTRYPOINT and CMD are the start command."""


def check_plan(plan: BuildPlan) -> None:
    """Refuse a plan that cannot work, before anything runs.

    Raises:
        InvalidRequest: too long, a base is missing or ambiguous.
        BuildFailed: a step is unknown or its arguments are not what it takes; ``details["step"]``
            is its number.
    """
    if sum(len(stage.steps) for stage in plan.stages) > limits.BUILD_STEPS_MAX:
        raise InvalidRequest(f"steps: at most {limits.BUILD_STEPS_MAX}")
    if len(plan.stages) > limits.BUILD_STAGES_MAX:
        raise InvalidRequest(f"stages: at most {limits.BUILD_STAGES_MAX}")
    for field, text in (("startCmd", plan.start_cmd), ("readyCmd", plan.ready_cmd)):
        if text is not None and (len(text) > limits.BUILD_ARG_CHARS_MAX or "\0" in text):
            raise InvalidRequest(f"{field}: has NUL, or is too long")
    known: set[str] = set()
    for stage in plan.stages:
        bases = (stage.from_image, stage.from_template, stage.from_stage)
        if sum(base is not None for base in bases) > 1:
            raise InvalidRequest("give one base: an image or a template")
        for number, step in enumerate(stage.steps, 1):
            _check_step(step, str(number), known, plan.style)
        known.add(stage.name)


def _check_step(step: BuildStep, number: str, stages: set[str], style: Style) -> None:
    place = f"step {number}" if step.line is None else f"line {step.line}"

    def refuse(why: str) -> BuildFailed:
        return BuildFailed(
            f"{place}: {step.type[:32]} {why}",
            remediation="Correct the step and build again.",
            details={"step": number, "type": step.type[:32], "line": step.line},
        )

    types = DOCKERFILE_TYPES if style == "dockerfile" else STEP_TYPES
    if step.type not in types:
        raise refuse(f"is no step that is known; known: {', '.join(types)}")
    for arg in step.args:
        if len(arg) > limits.BUILD_ARG_CHARS_MAX or "\0" in arg:
            raise refuse("has an argument with NUL, or one that is too long")
    args = step.args
    if step.type in ("RUN", "WORKDIR", "USER") and not (args and args[0].strip()):
        raise refuse("needs an argument")
    if step.type == "USER" and style == "e2b" and _OWNER_RE.fullmatch(args[0]) is None:
        raise refuse(f"cannot have the user `{args[0][:64]}`")
    if step.type in ("ENV", "ARG", "LABEL"):
        if len(args) % 2 or not args:
            raise refuse("needs pairs of name and value")
        for name in args[::2]:
            if _VARIABLE_RE.fullmatch(name) is None:
                raise refuse(f"cannot set `{name[:64]}`")
    if step.type == "COPY":
        _check_copy(step, refuse, stages, style)


def _check_copy(
    step: BuildStep, refuse: Callable[[str], BuildFailed], stages: set[str], style: Style
) -> None:
    args = step.args
    if len(args) < 2 or not args[0] or not args[1]:
        raise refuse("needs source and target")
    if any(".." in source.split("/") for source in (args[0], *step.more_sources)):
        raise refuse("cannot copy from outside of what was sent")
    if style == "e2b" and len(args) > 2 and args[2] and _OWNER_RE.fullmatch(args[2]) is None:
        raise refuse(f"cannot have the owner `{args[2][:64]}`")
    if style == "e2b" and len(args) > 3 and args[3] and _MODE_RE.fullmatch(args[3]) is None:
        raise refuse(f"needs an octal mode, not `{args[3][:16]}`")
    if step.from_stage is not None:
        if step.from_stage not in stages:
            raise refuse(f"copies from `{step.from_stage[:64]}`, which is no stage before it")
    elif step.files_hash is None or FILES_HASH_RE.fullmatch(step.files_hash) is None:
        raise refuse("needs the hash of its files: 64 hexadecimal characters")


def mode_of(step: BuildStep) -> int | None:
    """Permission bits that a ``COPY`` asks for.

    Raises:
        BuildFailed: a variable in it made it no octal number.
    """
    text = step.args[3] if len(step.args) > 3 else ""
    if not text:
        return None
    if _MODE_RE.fullmatch(text) is None:
        raise BuildFailed(f"COPY needs an octal mode, not `{text[:16]}`")
    return int(text.replace("o", ""), 8)
