# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec template``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import _command, _env_pair, _group, _mib


def add_template(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "template",
        "build templates, and list, tag, push and remove them",
        example="  opendsec template build -t mine:v1 .\n  opendsec run --template mine:v1 -- ls",
    )
    _add_template_build(inner)
    p = _command(
        inner,
        "make",
        "_templates:make",
        "build ready-made templates; without a name, list what there is",
        example="  opendsec template make python node",
    )
    p.add_argument("--no-cache", action="store_true", help="use no results of earlier builds")
    p.add_argument("-q", "--quiet", action="store_true", help="show errors only")
    p.add_argument("names", metavar="NAME", nargs="*", help="which")
    p = _command(inner, "ls", "_templates:ls", "list templates")
    p.add_argument("-q", "--quiet", action="store_true", help="names only")
    p = _command(inner, "inspect", "_templates:inspect", "all about a template, as JSON")
    p.add_argument("template", metavar="TEMPLATE", help="name or id")
    p = _command(inner, "rm", "_templates:rm", "remove templates; their sandboxes go on")
    p.add_argument("templates", metavar="TEMPLATE", nargs="+", help="name or id")
    p = _command(
        inner,
        "tag",
        "_templates:tag",
        "give tags to a build, or take them away",
        example="  opendsec template tag mine:v1 stable",
    )
    p.add_argument("-d", "--delete", action="store_true", help="take them away")
    p.add_argument("template", metavar="NAME[:TAG]", help="the build that gets them")
    p.add_argument("tags", metavar="TAG", nargs="+", help="tags")
    p = _command(inner, "logs", "_templates:logs", "the log of a build, live")
    p.add_argument("template", metavar="TEMPLATE", help="a template (its newest build) or a build")
    p = _command(
        inner,
        "push",
        "_templates:push",
        "send a template's image to a registry",
        example="  opendsec template push mine:v1 registry.example.com/mine:v1",
    )
    _registry_option(p)
    p.add_argument("template", metavar="NAME[:TAG]", help="what to send")
    p.add_argument("reference", metavar="REFERENCE", help="where to")


def _add_template_build(inner: Any) -> None:
    p = _command(
        inner,
        "build",
        "_templates:build",
        "build a template of a Dockerfile and print the build's id",
        example="  opendsec template build -t mine:v1 --build-arg PYTHON=3.12 .",
    )
    p.add_argument(
        "-f", "--file", metavar="FILE", help="the Dockerfile (default: CONTEXT/Dockerfile)"
    )
    p.add_argument(
        "-t", "--tag", metavar="NAME[:TAG]", required=True, help="the template's name (and tag)"
    )
    p.add_argument("--extra-tag", action="append", default=[], metavar="TAG", help="a further tag")
    p.add_argument(
        "--build-arg",
        action="append",
        default=[],
        type=_env_pair,
        metavar="NAME=VALUE",
        help="value of an ARG; NAME alone takes it from here",
    )
    p.add_argument("--target", metavar="STAGE", help="the last stage to build")
    p.add_argument("--no-cache", action="store_true", help="use no results of earlier builds")
    p.add_argument("--start", metavar="COMMAND", help="runs in every sandbox of the template")
    p.add_argument(
        "--start-image", action="store_true", help="the same with the image's ENTRYPOINT and CMD"
    )
    p.add_argument(
        "--ready-command", metavar="COMMAND", help="exits with 0 when what is started is up"
    )
    p.add_argument("--cpu", type=float, metavar="CORES", help="cores of its sandboxes")
    p.add_argument("--memory", type=_mib, metavar="SIZE", help="their memory: MiB, or 2g")
    p.add_argument("--disk", type=_mib, metavar="SIZE", help="their disk: MiB, or 10g")
    p.add_argument("-d", "--detach", action="store_true", help="print the build's id and return")
    p.add_argument("-q", "--quiet", action="store_true", help="show errors only")
    _registry_option(p)
    p.add_argument("context", metavar="CONTEXT", help="directory that COPY copies from")


def _registry_option(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--username", metavar="NAME", help="log in to the registry; the password is read from input"
    )
