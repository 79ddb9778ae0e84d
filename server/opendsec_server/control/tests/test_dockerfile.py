# SPDX-License-Identifier: AGPL-3.0-only
"""Dockerfiles as plans: what is understood, and what is refused with its line."""

from __future__ import annotations

import platform

import pytest

from opendsec_server.contract.errors import BuildFailed, InvalidRequest, NotSupported
from opendsec_server.contract.images import ImageConfig
from opendsec_server.control.builds.dockerfile import plan_of_dockerfile
from opendsec_server.control.builds.plan import BuildPlan, BuildStep, check_plan
from opendsec_server.control.builds.shape import Shape, configured, start_of, words_of
from opendsec_server.control.builds.words import BadWord, expand

CONTEXT = "c" * 64


def plan(text: str, target: str | None = None, **build_args: str) -> BuildPlan:
    made = plan_of_dockerfile(text, context=CONTEXT, build_args=build_args, target=target)
    check_plan(made)
    return made


def shape_of(text: str, **build_args: str) -> Shape:
    """What the configuration comes to, with nothing run."""
    shape = Shape(image="x")
    for step in plan(text, **build_args).stages[-1].steps:
        if step.type not in ("RUN", "COPY"):
            shape = configured(shape, step, e2b=False)
    return shape


def test_usual_file() -> None:
    made = plan(
        """# a comment
FROM python:3.12-slim AS base
RUN apt-get update \\
    # in between
 && apt-get install -y git
COPY --chown=app:app --chmod=755 a.txt b/ /opt/
run ["echo", "a b"]
"""
    )
    (stage,) = made.stages
    assert (stage.name, stage.from_image) == ("base", "python:3.12-slim")
    run, copy, listed = stage.steps
    assert run.type == "RUN"
    assert run.args[0].split() == ["apt-get", "update", "&&", "apt-get", "install", "-y", "git"]
    assert run.line == 3
    assert copy.args == ("a.txt", "/opt/", "app:app", "755")
    assert copy.more_sources == ("b/",)
    assert copy.files_hash == CONTEXT
    assert listed.args == ("echo 'a b'",)


def test_stages_and_what_copies_between_them() -> None:
    text = """ARG VERSION=1.22
FROM golang:${VERSION} AS build
RUN go build
FROM build AS test
RUN go test
FROM alpine
COPY --from=build /app /app
COPY --from=0 /x /x
COPY --from=ghcr.io/tool:1 /tool /bin/
"""
    made = plan(text, VERSION="1.23")
    assert [s.name for s in made.stages] == ["build", "test", "image-3-9", "2"]
    assert made.stages[0].from_image == "golang:1.23"
    assert made.stages[1].from_stage == "build"
    assert made.stages[2].from_image == "ghcr.io/tool:1"
    assert [s.from_stage for s in made.stages[-1].steps] == ["build", "build", "image-3-9"]
    assert [s.name for s in plan(text, target="test").stages] == ["build", "test"]
    assert [s.name for s in plan(text, target="0").stages] == ["build"]
    with pytest.raises(InvalidRequest, match="no stage `nope`"):
        plan(text, target="nope")


def test_variables_are_those_of_their_time() -> None:
    shape = shape_of(
        """ARG TOP=top
FROM x
ARG TOP
ARG GIVEN=default
ARG NEVER
ENV A=1 B="two words" C=$A
ENV D old form of it
ENV E=${A:-no}${MISSING:-yes}${A:+set} F='$A' G=\\$A
ENV PATH=/opt/bin:$PATH
ENV H=$TOP-$GIVEN-$NEVER
WORKDIR /srv/$A
WORKDIR sub
USER ${GIVEN}
LABEL a.b="x y" c=$A
EXPOSE 80 ${A}443/udp
STOPSIGNAL SIGINT
ENTRYPOINT ["run", "$A"]
CMD serve all
""",
        GIVEN="given",
    )
    assert shape.env == {
        "A": "1",
        "B": "two words",
        "C": "",
        "D": "old form of it",
        "E": "1yesset",
        "F": "$A",
        "G": "$A",
        "PATH": "/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "H": "top-given-",
    }
    assert (shape.workdir, shape.user) == ("/srv/1/sub", "given")
    assert shape.config == ImageConfig(
        labels={"a.b": "x y", "c": "1"},
        exposed_ports=("80/tcp", "1443/udp"),
        stop_signal="SIGINT",
        entrypoint=("run", "$A"),
        cmd=("/bin/sh", "-c", "serve all"),
    )
    start = start_of(BuildPlan(stages=(), style="dockerfile", start_image=True), shape)
    assert start is not None
    assert start.argv == ("run", "$A", "/bin/sh", "-c", "serve all")


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("FROM x\nONBUILD RUN a", 2, "triggers"),
        ('FROM x\n\nSHELL ["bash"]', 3, "shell"),
        ("FROM x\nRUN --mount=type=cache,target=/c a", 2, "--mount"),
        ("FROM x\nRUN <<EOF\necho\nEOF", 2, "here-documents"),
        ("FROM x\nCOPY <<EOF /a\nEOF", 2, "here-documents"),
        ("FROM x\nADD https://x.test/a /a", 2, "addresses"),
        ("FROM x\nADD a.tar.gz /a", 2, "archives"),
        ("FROM x\nCOPY --parents a /b", 2, "--parents"),
        ("FROM x\nCOPY a b /c", 2, "end with `/`"),
        ("FROM x\nCOPY a", 2, "source and target"),
        ("FROM x\nFLY away", 2, "no instruction"),
        ("FROM x\nENV A", 2, "value"),
        ("FROM x\nENV A=1 B", 2, "name=value"),
        ("RUN a", 1, "before the first FROM"),
        ("FROM a b c d", 1, "FROM image"),
        ("FROM $NOTHING", 1, "no image"),
        ("FROM x AS UPPER/CASE", 1, "name of a stage"),
        ("FROM x\nRUN", 2, ""),
    ],
)
def test_what_is_not_supported_is_refused_with_its_line(text: str, line: int, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(text)
    assert f"line {line}:" in refused.value.message
    assert told in refused.value.message
    assert refused.value.details["line"] == line


def test_other_refusals() -> None:
    for text in ("", "# only a comment", "ARG A=1"):
        with pytest.raises(InvalidRequest):
            plan(text)
    with pytest.raises(InvalidRequest, match="escape"):
        plan("# escape=`\nFROM x")
    with pytest.raises(NotSupported, match="line 1"):
        plan("FROM --platform=linux/s390x x")
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    assert plan(f"FROM --platform=linux/{architecture} x").stages[0].from_image == "x"
    assert plan("FROM --platform=$BUILDPLATFORM x").stages[0].from_image == "x"
    with pytest.raises(InvalidRequest, match="no context"):
        plan_of_dockerfile("FROM x\nCOPY a /a", context=None, build_args={}, target=None)
    with pytest.raises(BuildFailed, match="line 2"):
        plan("FROM x\nCOPY ../a /a")
    with pytest.raises(InvalidRequest, match="larger"):
        plan("FROM x\n" + "RUN a\n" * 200_000)
    assert plan("FROM x\nHEALTHCHECK CMD a\nVOLUME /a").stages[0].steps == ()
    assert plan("FROM scratch").stages[0].from_image is None


def test_an_open_quote_fails_at_its_step() -> None:
    step = BuildStep(type="ENV", args=("A", '"open'), line=7)
    with pytest.raises(BuildFailed, match="line 7"):
        words_of(Shape(image="x"), step, e2b=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A${B}c", "12c"),
        ("${NO:-${A}}", "1"),
        ("$", "$"),
        ("$1", "$1"),
        ("a\\ b", "a b"),
        ('"a\\"b"', 'a"b'),
        ('"a\\nb"', "a\\nb"),
        ("'a\"b'", 'a"b'),
    ],
)
def test_words(text: str, value: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == value


@pytest.mark.parametrize("text", ["${A", '"a', "'", "${A?x}", "${}"])
def test_bad_words(text: str) -> None:
    with pytest.raises(BadWord):
        expand(text, {})


DOUBLED = "".join(f"ARG A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 60))
"""Each holds the one before twice: the last would have 2**59 times the first."""


@pytest.mark.parametrize(
    "text",
    [
        f"ARG A0=xx\n{DOUBLED}FROM x",
        f"ARG A={'x' * 60_000}\nARG {' '.join(f'B{n}=$A' for n in range(20))}\nFROM x",
        "ARG A=" + "${A:-" * 2_000 + "}" * 2_000 + "\nFROM x",
        "FROM x\n" * 65,
        "FROM x\n" + "RUN x\n" * 3_000,
    ],
    ids=["doubled", "many", "deep", "stages", "lines"],
)  # fmt: skip
def test_bombs(text: str) -> None:
    with pytest.raises(InvalidRequest):
        plan(text)


@pytest.mark.parametrize("kind", ["ARG", "ENV"])
def test_doubled_in_a_stage(kind: str) -> None:
    with pytest.raises(BuildFailed, match="more than"):
        shape_of(f"FROM x\n{kind} A0=xx\n" + DOUBLED.replace("ARG", kind))


@pytest.mark.parametrize("kind", ["ARG", "ENV", "LABEL"])
def test_too_much_in_a_stage(kind: str) -> None:
    longest = f"FROM x\nENV A={'x' * 60_000}\n"
    with pytest.raises(BuildFailed, match="more than"):
        shape_of(longest + f"{kind} " + " ".join(f"B{n}=$A" for n in range(20)))
    with pytest.raises(BuildFailed, match="more than"):
        shape_of(longest + "".join(f"{kind} B{n}=$A\n" for n in range(3)))


@pytest.mark.parametrize("number", ["²", "9" * 5_000])
def test_stage_that_is_no_number(number: str) -> None:
    """It is taken for an image's name, which is refused where it is pulled."""
    made = plan(f"FROM a\nFROM b\nCOPY --from={number} x y")
    assert made.stages[1].from_image == number
