# SPDX-License-Identifier: AGPL-3.0-only
"""A Dockerfile as a plan. Lines are found by ``dockerfile-parse``; what they mean is decided here.

https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import io
import platform
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import WordSplitter

from opendsec_server.contract.errors import InvalidRequest, NotSupported

from .plan import BuildPlan, BuildStep, Stage
from .words import BadWord, expand

DOCKERFILE_BYTES_MAX = 1 << 20
INSTRUCTIONS_MAX = 2_048
GLOBALS_CHARS_MAX = 1 << 20
"""All values of ``ARG`` before the first ``FROM``."""
_HEREDOC_RE = re.compile(r"(^|\s)<<-?[\"']?[A-Za-z_]\w*")
_STAGE_RE = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_TAR_RE = re.compile(r"\.(tar|tgz|tbz2?|txz|tzst|tar\.\w+)$")
_REFUSED = {
    "ONBUILD": "triggers for later builds are not supported",
    "SHELL": 'another shell is not supported: write `RUN ["bash", "-c", "…"]`',
}
_IGNORED = frozenset({"HEALTHCHECK", "VOLUME", "MAINTAINER"})
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class _Line(msgspec.Struct, frozen=True):
    number: int
    instruction: str
    value: str

    def refuse(self, why: str) -> InvalidRequest:
        return InvalidRequest(
            f"Dockerfile, line {self.number}: {self.instruction[:32]}: {why}",
            remediation="Correct the line and build again.",
            details={"line": self.number, "instruction": self.instruction[:32]},
        )


def plan_of_dockerfile(
    text: str,
    *,
    context: str | None,
    build_args: Mapping[str, str],
    target: str | None,
) -> BuildPlan:
    """What a Dockerfile tells to do.

    Args:
        text: The Dockerfile.
        context: Hash of the archive that ``COPY`` copies from. None: there is none.
        build_args: Values for its ``ARG`` lines.
        target: Name or number of the last stage to build. None: the last.

    Raises:
        InvalidRequest: a line cannot be understood; ``details["line"]`` has its number.
        NotSupported: it needs another processor.
    """
    if len(text.encode()) > DOCKERFILE_BYTES_MAX:
        raise InvalidRequest(f"the Dockerfile is larger than {DOCKERFILE_BYTES_MAX} bytes")
    reader = _Reader(context, dict(build_args))
    for line in _lines(text):
        reader.read(line)
    return reader.plan(target)


def _lines(text: str) -> list[_Line]:
    if re.match(r"\s*#\s*escape\s*=\s*`", text, re.IGNORECASE):
        raise InvalidRequest("Dockerfile, line 1: the escape character ` is not supported")
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    structure = parser.structure
    lines = []
    for part in structure:
        number, instruction = part["startline"] + 1, str(part["instruction"]).upper()
        if instruction == "COMMENT":
            continue
        line = _Line(number, instruction, str(part["value"]).strip())
        if instruction in ("RUN", "COPY", "ADD") and _HEREDOC_RE.search(line.value):
            raise line.refuse("here-documents are not supported")
        lines.append(line)
    _refuse_overlooked(text, structure)
    if not lines:
        raise InvalidRequest("the Dockerfile has no instruction")
    if len(lines) > INSTRUCTIONS_MAX:
        raise InvalidRequest(f"the Dockerfile has more than {INSTRUCTIONS_MAX} instructions")
    return lines


def _refuse_overlooked(text: str, structure: list[dict[str, Any]]) -> None:
    """The parser passes over a line without arguments in silence."""
    seen = {
        number for part in structure for number in range(part["startline"], part["endline"] + 1)
    }
    for number, line in enumerate(text.split("\n")):
        if line.strip() and number not in seen:
            word = line.split()[0]
            raise _Line(number + 1, word, "").refuse("has no arguments, or is no instruction")


class _Reader:
    """Goes through the lines, from FROM to FROM."""

    def __init__(self, context: str | None, build_args: dict[str, str]) -> None:
        self._context = context
        self._build_args = build_args
        architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
        here = f"linux/{architecture}"
        self._globals = {
            "TARGETPLATFORM": here,
            "BUILDPLATFORM": here,
            "TARGETARCH": architecture,
            "BUILDARCH": architecture,
            "TARGETOS": "linux",
            "BUILDOS": "linux",
        }
        self._globals_chars = 0
        self._platform = here
        self._stages: list[Stage] = []
        self._steps: list[BuildStep] = []

    def plan(self, target: str | None) -> BuildPlan:
        self._end_stage()
        if not self._stages:
            raise InvalidRequest("the Dockerfile has no FROM")
        stages = self._stages
        if target is not None:
            numbers = [
                n for n, s in enumerate(stages) if target.lower() == s.name or target == str(n)
            ]
            if not numbers:
                raise InvalidRequest(f"target: the Dockerfile has no stage `{target[:64]}`")
            stages = stages[: numbers[-1] + 1]
        return BuildPlan(stages=tuple(stages), style="dockerfile")

    def read(self, line: _Line) -> None:
        if line.instruction in _REFUSED:
            raise line.refuse(_REFUSED[line.instruction])
        if line.instruction == "FROM":
            self._from(line)
            return
        if line.instruction == "ARG":
            self._arg(line)
            return
        if not self._stages:
            raise line.refuse("comes before the first FROM")
        if line.instruction in _IGNORED:
            return
        handler = self._HANDLERS.get(line.instruction)
        if handler is None:
            raise line.refuse("is no instruction that is known")
        if not line.value:
            raise line.refuse("needs an argument")
        handler(self, line)

    # --- stages -------------------------------------------------------------

    def _from(self, line: _Line) -> None:
        self._end_stage()
        flags, words = _flags(line)
        wanted = self._expand(line, flags.pop("platform", self._platform), self._globals)
        if flags:
            raise line.refuse(f"the flag --{next(iter(flags))} is not supported")
        if wanted != self._platform:
            raise NotSupported(
                f"Dockerfile, line {line.number}: images for {wanted[:64]} cannot run here",
                remediation=f"Leave --platform out: this server runs {self._platform}.",
                details={"line": line.number},
            )
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
            raise line.refuse("is written `FROM image` or `FROM image AS name`")
        image = self._expand(line, words[0], self._globals)
        name = words[2].lower() if len(words) == 3 else str(len(self._stages))
        if _STAGE_RE.fullmatch(name) is None:
            raise line.refuse(f"`{name[:64]}` is no name of a stage")
        if not image:
            raise line.refuse("names no image")
        base: dict[str, Any] = {"from_image": image}
        if image.lower() in {stage.name for stage in self._stages}:
            base = {"from_stage": image.lower()}
        elif image == "scratch":
            base = {}
        self._stages.append(Stage(name=name, **base))

    def _end_stage(self) -> None:
        if self._stages:
            self._stages[-1] = msgspec.structs.replace(self._stages[-1], steps=tuple(self._steps))
        self._steps = []

    # --- instructions -------------------------------------------------------

    def _arg(self, line: _Line) -> None:
        for word in _words(line):
            name, has_default, default = word.partition("=")
            if name in self._build_args:
                value: str | None = shlex.quote(self._build_args[name])
            elif has_default:
                value = default
            elif self._stages and name in self._globals:
                value = shlex.quote(self._globals[name])
            else:
                value = None
            if not self._stages:
                if value is not None:
                    self._globals[name] = self._expand(line, value, self._globals)
                    self._globals_chars += len(self._globals[name])
                    if self._globals_chars > GLOBALS_CHARS_MAX:
                        raise line.refuse("all values together are too long")
            elif value is not None:
                self._add(line, "ARG", name, value)

    def _env(self, line: _Line) -> None:
        self._add(line, "ENV", *_pairs(line))

    def _label(self, line: _Line) -> None:
        self._add(line, "LABEL", *_pairs(line))

    def _run(self, line: _Line) -> None:
        flags, _ = _flags(line)
        if flags:
            raise line.refuse(f"the flag --{next(iter(flags))} is not supported")
        argv = _exec_form(line.value)
        self._add(line, "RUN", line.value if argv is None else shlex.join(argv))

    def _workdir(self, line: _Line) -> None:
        self._add(line, "WORKDIR", line.value)

    def _user(self, line: _Line) -> None:
        self._add(line, "USER", line.value)

    def _expose(self, line: _Line) -> None:
        self._add(line, "EXPOSE", *_words(line))

    def _stopsignal(self, line: _Line) -> None:
        self._add(line, "STOPSIGNAL", line.value)

    def _cmd(self, line: _Line) -> None:
        self._add(line, "CMD", *(_exec_form(line.value) or ("/bin/sh", "-c", line.value)))

    def _entrypoint(self, line: _Line) -> None:
        self._add(line, "ENTRYPOINT", *(_exec_form(line.value) or ("/bin/sh", "-c", line.value)))

    def _copy(self, line: _Line) -> None:
        flags, words = _flags(line)
        owner, mode = flags.pop("chown", ""), flags.pop("chmod", "")
        flags.pop("link", None)
        from_stage = flags.pop("from", None)
        if flags:
            raise line.refuse(f"the flag --{next(iter(flags))} is not supported")
        listed = _exec_form(line.value[line.value.find("[") :]) if "[" in line.value else None
        words = list(listed) if listed else words
        if len(words) < 2:
            raise line.refuse("needs source and target")
        *sources, target = words
        for source in sources:
            if line.instruction == "ADD" and (
                "://" in source or source.startswith("git@") or _TAR_RE.search(source)
            ):
                raise line.refuse("addresses and archives are not supported: use COPY and RUN")
        if len(sources) > 1 and not target.endswith("/"):
            raise line.refuse("with several sources, the target must end with `/`")
        if from_stage is not None:
            from_stage = self._stage_named(line, from_stage)
        elif self._context is None:
            raise line.refuse("there is no context to copy from")
        self._steps.append(
            BuildStep(
                type="COPY",
                args=(sources[0], target, owner, mode),
                more_sources=tuple(sources[1:]),
                files_hash=None if from_stage is not None else self._context,
                from_stage=from_stage,
                line=line.number,
            )
        )

    def _stage_named(self, line: _Line, wanted: str) -> str:
        earlier = self._stages[:-1]
        numbered = {str(n): stage.name for n, stage in enumerate(earlier)}
        if wanted in numbered:
            return numbered[wanted]
        name = wanted.lower()
        if name in {stage.name for stage in earlier}:
            return name
        # Another image: a stage of its own, before this one.
        image = self._expand(line, wanted, self._globals)
        name = f"image-{len(self._stages)}-{line.number}"
        self._stages.insert(len(self._stages) - 1, Stage(name=name, from_image=image))
        return name

    def _add(self, line: _Line, kind: str, *args: str) -> None:
        self._steps.append(BuildStep(type=kind, args=args, line=line.number))

    _HANDLERS: ClassVar[dict[str, Callable[[_Reader, _Line], None]]] = {
        "ENV": _env,
        "LABEL": _label,
        "RUN": _run,
        "WORKDIR": _workdir,
        "USER": _user,
        "EXPOSE": _expose,
        "STOPSIGNAL": _stopsignal,
        "CMD": _cmd,
        "ENTRYPOINT": _entrypoint,
        "COPY": _copy,
        "ADD": _copy,
    }

    @staticmethod
    def _expand(line: _Line, text: str, variables: Mapping[str, str]) -> str:
        try:
            return expand(text, variables)
        except BadWord as exc:
            raise line.refuse(str(exc)) from exc


def _words(line: _Line) -> list[str]:
    """The words of a line, with quotes and variables as written."""
    return list(WordSplitter(line.value).split(dequote=False))


def _flags(line: _Line) -> tuple[dict[str, str], list[str]]:
    words = _words(line)
    flags: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        flags[name] = value
    return flags, words


def _pairs(line: _Line) -> list[str]:
    """Names and values of ``ENV`` and ``LABEL``, in both of their forms."""
    words = _words(line)
    if "=" not in words[0]:
        if len(words) == 1:
            raise line.refuse("needs a value")
        return [words[0], line.value.split(None, 1)[1]]
    pairs: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise line.refuse(f"`{word[:64]}` is not name=value")
        pairs += [name.strip("\"'"), value]
    return pairs


def _exec_form(text: str) -> tuple[str, ...] | None:
    """The list of a JSON form. None: it is not one."""
    if not text.startswith("["):
        return None
    try:
        return tuple(msgspec.json.decode(text.encode(), type=list[str])) or None
    except msgspec.DecodeError:
        return None
