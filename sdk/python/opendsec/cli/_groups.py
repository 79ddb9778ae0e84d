# SPDX-License-Identifier: Apache-2.0
"""``opendsec group``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from opendsec import Client, Group, GroupInfo, InvalidRequest, SandboxNotFound, ServiceInfo
from opendsec._compose import FILE_BYTES_MAX

from . import _exit
from ._group_parser import DEFAULT_FILES
from ._output import age, print_json, print_table, waiting
from ._session import client_of


def up(args: argparse.Namespace) -> int:
    """Make a group."""
    path = _file_of(args.file)
    options: dict[str, Any] = {
        "timeout_s": args.timeout,
        "start_timeout_s": args.start_timeout,
        "task_id": args.task,
        "labels": args.label or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with client_of(args) as client:
        if path.suffix == ".json":
            group = _from_json(client, path, args.name, given)
        else:
            group = client.groups.from_compose(
                path, name=args.name, profiles=args.profile, wait=False, **given
            )
        for text in group.warnings:
            # Also to programs: what a file asked for, and does not get.
            print(f"opendsec: {text}", file=sys.stderr)
        if not args.detach:
            with waiting("Starting the group..."):
                group.wait_healthy()
    if args.json:
        print_json(group.info)
    else:
        print(group.info.name)
    return _exit.OK


def _file_of(name: str | None) -> Path:
    if name is not None:
        return Path(name)
    for default in DEFAULT_FILES:
        if Path(default).is_file():
            return Path(default)
    raise InvalidRequest(f"There is none of {', '.join(DEFAULT_FILES)} here; name one with -f.")


def _from_json(client: Client, path: Path, name: str | None, given: dict[str, Any]) -> Group:
    try:
        with path.open("rb") as file:
            body = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{path}: {exc}") from exc
    if not isinstance(body, dict) or not isinstance(body.get("services"), dict):
        raise InvalidRequest(f"{path}: must be an object with `services`")
    known = {"services", "name", "timeout_s", "start_timeout_s", "task_id", "labels"}
    if set(body) - known:
        raise InvalidRequest(f"{path}: `{min(set(body) - known)}` is not known")
    if not all(isinstance(service, dict) for service in body["services"].values()):
        raise InvalidRequest(f"{path}: each of `services` must be an object")
    if name is not None:
        body["name"] = name
    return client.groups.create(**{**body, **given}, wait=False)


def ls(args: argparse.Namespace) -> int:
    """List groups."""
    with client_of(args) as client:
        found = list(client.groups.list(states=args.state, limit=args.limit))
    if args.json:
        print_json(found)
    elif args.quiet:
        for group in found:
            print(group.group_id)
    else:
        print_table(
            ["GROUP", "NAME", "STATE", "SERVICES", "AGE", "ENDS"], [_row(group) for group in found]
        )
    return _exit.OK


def _row(group: GroupInfo) -> list[str]:
    running = sum(one.sandbox_state == "running" for one in group.services)
    return [
        group.group_id,
        group.name,
        group.state,
        f"{running}/{len(group.services)}",
        age(group.created_at),
        group.end_reason or age(group.end_at),
    ]


def inspect(args: argparse.Namespace) -> int:
    """All about a group."""
    with client_of(args) as client:
        print_json(client.groups.get(args.group).info)
    return _exit.OK


def ps(args: argparse.Namespace) -> int:
    """The services of a group."""
    with client_of(args) as client:
        info = client.groups.get(args.group).info
    if args.json:
        print_json(info.services)
        return _exit.OK
    print_table(
        ["SERVICE", "STATE", "SANDBOX", "SANDBOX STATE", "PROGRAM", "MESSAGE"],
        [_service_row(one) for one in info.services],
    )
    return _exit.OK


def _service_row(one: ServiceInfo) -> list[str]:
    program = "-"
    if one.program is not None:
        program = one.program.state
        if one.program.signal is not None:
            program += f" (signal {one.program.signal})"
        elif one.program.exit_code is not None:
            program += f" ({one.program.exit_code})"
    state = one.sandbox_state or "-"
    return [
        one.name,
        one.state,
        one.sandbox_id or "-",
        f"{state} ({one.end_reason})" if one.end_reason else state,
        program,
        (one.message or "-").splitlines()[0],
    ]


def logs(args: argparse.Namespace) -> int:
    """What the programs have written."""
    with client_of(args) as client:
        group = client.groups.get(args.group)
        names = [args.service] if args.service else [one.name for one in group.info.services]
        for name in names:
            try:
                found = group.logs(name)
            except SandboxNotFound:
                if args.service:
                    raise
                print(f"opendsec: {name}: its sandbox is gone, its output too", file=sys.stderr)
                continue
            if args.json:
                print_json({"service": name, "logs": found})
                continue
            prefix = "" if args.service else f"{name} | "
            for text, stream in ((found.stdout, sys.stdout), (found.stderr, sys.stderr)):
                for line in text.splitlines():
                    print(f"{prefix}{line}", file=stream)
    return _exit.OK


def exec(args: argparse.Namespace) -> int:
    """Run a program in the sandbox of a service."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise InvalidRequest("There is no program to run.")
    with client_of(args) as client:
        group = client.groups.get(args.group)
        group.service(args.service)
        sandbox = group.sandboxes.get(args.service)
        if sandbox is None:
            raise SandboxNotFound(f"The service {args.service} has no living sandbox.")
        result = sandbox.exec(command, timeout_s=args.timeout)
    if args.json:
        print_json(result)
        return _exit.OK
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.exit_code


def pause(args: argparse.Namespace) -> int:
    """Pause a group."""
    with client_of(args) as client, waiting("Pausing the group..."):
        return _told(client.groups.get(args.group).pause(), args)


def resume(args: argparse.Namespace) -> int:
    """Resume a group."""
    with client_of(args) as client, waiting("Resuming the group..."):
        return _told(client.groups.get(args.group).resume(), args)


def down(args: argparse.Namespace) -> int:
    """End a group."""
    with client_of(args) as client, waiting("Ending the group..."):
        return _told(client.groups.get(args.group).kill(), args)


def _told(info: GroupInfo, args: argparse.Namespace) -> int:
    if args.json:
        print_json(info)
    else:
        print(f"{info.name}: {info.state}")
    return _exit.OK
