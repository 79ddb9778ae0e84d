# SPDX-License-Identifier: Apache-2.0
"""``template build|make|ls|inspect|rm|tag|logs|push``."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

from opendsec import (
    Build,
    BuildFailed,
    BuildLogEntry,
    InvalidRequest,
    OpendsecError,
    TemplateInfo,
    TemplateNotFound,
)
from opendsec._ready_made import READY_MADE
from opendsec._sync._client import Client

from . import _exit
from ._output import age, note, print_json, print_table, waiting, wants_colour
from ._remove import remove_each
from ._session import client_of

_COLOURS = {"error": "\x1b[31m", "warn": "\x1b[33m", "debug": "\x1b[2m"}
_OFF = "\x1b[0m"


def build(args: argparse.Namespace) -> int:
    """Build a template of a Dockerfile, and show its log as it comes."""
    context = Path(args.context)
    dockerfile = Path(args.file) if args.file else context / "Dockerfile"
    text = _read(dockerfile)
    with client_of(args) as client:
        with waiting("Sending the context..."):
            started = client.templates.start_build(
                args.tag,
                dockerfile=text,
                context=context,
                build_args=dict(args.build_arg),
                target=args.target,
                tags=args.extra_tag,
                cpu=args.cpu,
                memory_mb=args.memory,
                disk_mb=args.disk,
                start_command=args.start,
                start_image=args.start_image,
                ready_command=args.ready_command,
                force=args.no_cache,
                username=args.username,
                password=_password(args),
            )
        if args.detach:
            return _show(args, started)
        try:
            done = client.templates.wait(
                started.build_id, on_log=None if args.json else _Printer(args.quiet)
            )
        except KeyboardInterrupt:
            client.templates.cancel_build(started.build_id)
            note("The build is cancelled; what it has done is kept.")
            raise
    return _show(args, done)


def make(args: argparse.Namespace) -> int:
    """Build ready-made templates, or say which there are."""
    if not args.names:
        return _list_ready_made(args)
    made = []
    with client_of(args) as client:
        for name in args.names:
            made.append(
                client.templates.make(
                    name,
                    force=args.no_cache,
                    on_log=None if args.json else _Printer(args.quiet),
                )
            )
            if not args.json:
                print(name)
    if args.json:
        print_json(made)
    return _exit.OK


def _list_ready_made(args: argparse.Namespace) -> int:
    if args.json:
        print_json(READY_MADE)
    else:
        print_table(
            ["NAME", "WHAT"], [[name, recipe.description] for name, recipe in READY_MADE.items()]
        )
    return _exit.OK


def _show(args: argparse.Namespace, found: Build) -> int:
    if args.json:
        print_json(found)
    else:
        print(found.build_id)
    return _exit.OK


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(
            f"Cannot read {path}: {exc}", remediation="Name the Dockerfile by -f."
        ) from exc


def _password(args: argparse.Namespace) -> str | None:
    """From the standard input, so that no list of processes shows it."""
    if args.username is None:
        return None
    return sys.stdin.readline().rstrip("\n")


class _Printer:
    """Writes log lines to standard error: what is asked for is the id on standard output."""

    def __init__(self, quiet: bool = False, stream: str = "stderr") -> None:
        self._quiet = quiet
        self._out = sys.stderr if stream == "stderr" else sys.stdout
        self._colour = wants_colour(self._out)

    def __call__(self, entry: BuildLogEntry) -> None:
        if entry.level == "debug" or (self._quiet and entry.level != "error"):
            return
        text = f"{_clock(entry.at)} {entry.step or '-':>8}  {entry.message}"
        colour = _COLOURS.get(entry.level, "") if self._colour else ""
        print(f"{colour}{text}{_OFF if colour else ''}", file=self._out, flush=True)


def _clock(at: datetime) -> str:
    return at.astimezone().strftime("%H:%M:%S")


def ls(args: argparse.Namespace) -> int:
    """List templates."""
    with client_of(args) as client:
        found = client.templates.list()
    if args.json:
        print_json(found)
    elif args.quiet:
        for template in found:
            print(template.name or template.template_id)
    else:
        print_table(
            ["NAME", "ID", "STATE", "BUILDS", "CPU", "MEMORY", "DISK", "AGE", "OF"],
            [_row(template) for template in found],
        )
    return _exit.OK


def _row(template: TemplateInfo) -> list[str]:
    return [
        template.name or "-",
        template.template_id,
        template.state,
        str(template.builds) if template.own else "-",
        "-" if template.cpu is None else f"{template.cpu:g}",
        "-" if template.memory_mb is None else f"{template.memory_mb} MiB",
        "-" if template.disk_mb is None else f"{template.disk_mb} MiB",
        age(template.created_at),
        ("public" if template.public else "project") if template.own else "server",
    ]


def inspect(args: argparse.Namespace) -> int:
    """Everything about a template, as JSON."""
    with client_of(args) as client:
        print_json(client.templates.get(args.template))
    return _exit.OK


def rm(args: argparse.Namespace) -> int:
    """Remove templates, as many as can be."""
    with client_of(args) as client:

        def remove(name: str) -> None:
            if not client.templates.delete(name):
                raise TemplateNotFound(f"There is no template {name}.")

        return remove_each(args, args.templates, remove)


def tag(args: argparse.Namespace) -> int:
    """Give tags to a build, or take them away."""
    with client_of(args) as client:
        if args.delete:
            for name in args.tags:
                if not client.templates.remove_tag(args.template, name):
                    raise TemplateNotFound(f"{args.template} has no tag {name}.")
        else:
            client.templates.assign_tags(args.template, args.tags)
        found = client.templates.get(args.template.partition(":")[0])
    if args.json:
        print_json(found.tags)
    else:
        print_table(
            ["TAG", "BUILD", "AGE"], [[t.tag, t.build_id, age(t.created_at)] for t in found.tags]
        )
    return _exit.OK


def logs(args: argparse.Namespace) -> int:
    """The log of a build, or of a template's newest."""
    with client_of(args) as client:
        build_id = _build_of(client, args.template)
        show = _Printer(stream="stdout")
        for entry in client.templates.logs(build_id):
            if args.json:
                print_json(entry)
            else:
                show(entry)
        ended = client.templates.build_info(build_id)
    if ended.error is not None:
        note(f"The build failed ({ended.error.code}).")
        return _exit.code_for(BuildFailed(ended.error.message), runs_program=False)
    return _exit.OK


def _build_of(client: Client, name: str) -> str:
    try:
        builds = client.templates.get(name).newest_builds
    except OpendsecError as error:
        if not isinstance(error, (TemplateNotFound, InvalidRequest)):
            raise
        return client.templates.build_info(name).build_id
    if not builds:
        raise TemplateNotFound(f"{name} has no build that this project may see.")
    return builds[0].build_id


def push(args: argparse.Namespace) -> int:
    """Send a template's image to a registry."""
    with client_of(args) as client, waiting("Pushing..."):
        digest = client.templates.push(
            args.template, args.reference, username=args.username, password=_password(args)
        )
    if args.json:
        print_json({"digest": digest})
    else:
        print(digest)
    return _exit.OK
