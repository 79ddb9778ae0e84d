# SPDX-License-Identifier: Apache-2.0
"""``project``, ``principal``, ``token`` and ``audit``: who may do what, and who did."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from opendsec import (
    AuditEntry,
    AuditVerdict,
    Client,
    NotFound,
    PrincipalInfo,
    ProjectInfo,
    Quota,
    verify_audit,
)

from . import _exit
from ._iam_parser import NONE, QUOTA
from ._output import age, print_json, print_table, waiting
from ._remove import remove_each
from ._session import client_of

FOUND_FAULT = 1


def project_ls(args: argparse.Namespace) -> int:
    """List projects."""
    with client_of(args) as client:
        found = client.projects.list(closed=args.all)
    if args.json:
        print_json(found)
    elif args.quiet:
        for project in found:
            print(project.project_id)
    else:
        top = found[0].depth if found else 0
        print_table(
            ["ID", "NAME", "SANDBOXES", "CPU", "MEMORY", "DISK", "AGE"],
            [_project_row(project, top) for project in found],
        )
    return _exit.OK


def _project_row(project: ProjectInfo, top: int) -> list[str]:
    name = "  " * (project.depth - top) + project.name
    return [
        project.project_id,
        name + (" (closed)" if project.closed_at else ""),
        *(_of(project, dimension) for dimension in ("sandboxes", "cpu", "memory_mb", "disk_mb")),
        age(project.created_at),
    ]


def _of(project: ProjectInfo, dimension: str) -> str:
    limit = getattr(project.quota, dimension)
    use = f"{getattr(project.use, dimension):g}"
    return use if limit is None else f"{use} of {limit:g}"


def project_show(args: argparse.Namespace) -> int:
    """All about a project."""
    with client_of(args) as client:
        return _show(client.projects.get(_project(client, args.project)), args)


def project_create(args: argparse.Namespace) -> int:
    """Make a project."""
    quota = {name: value for name, value in _limits(args).items() if value is not None}
    with client_of(args) as client:
        made = client.projects.create(
            args.name, parent_id=args.parent, quota=msgspec.convert(quota, Quota)
        )
    if args.json:
        print_json(made)
    else:
        print(made.project_id)
    return _exit.OK


def project_set(args: argparse.Namespace) -> int:
    """Rename a project, or change its limits."""
    with client_of(args) as client:
        return _show(
            client.projects.change(args.project, name=args.name, limits=_limits(args)), args
        )


def project_close(args: argparse.Namespace) -> int:
    """Close projects."""
    with client_of(args) as client:
        return remove_each(args, args.projects, client.projects.close)


def project_key(args: argparse.Namespace) -> int:
    """Make a key of a project."""
    with Client(base_url=args.url, project_id=args.project) as client:
        made = client.api_keys.create(args.name)
    if args.json:
        print_json(made)
    else:
        print(made.key)
    return _exit.OK


def _show(project: ProjectInfo, args: argparse.Namespace) -> int:
    if args.json:
        print_json(project)
        return _exit.OK
    facts = {
        "project": project.project_id,
        "name": project.name,
        "parent": project.parent_id or "-",
        "closed": "-" if project.closed_at is None else project.closed_at.isoformat(),
    }
    for name, value in facts.items():
        print(f"{name:<10}{value}")
    rows = []
    for name in QUOTA:
        limit, handed_on = getattr(project.quota, name), getattr(project.handed_on, name)
        use = "-" if name == "creates_per_s" else f"{getattr(project.use, name):g}"
        rows.append([name, use, "-" if limit is None else f"{limit:g}", f"{handed_on:g}"])
    print_table(["OF", "USE", "LIMIT", "HANDED ON"], rows)
    return _exit.OK


def _project(client: Client, named: str | None) -> str:
    return named or client.projects.caller().project_id


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, f"quota_{name}") for name in QUOTA}
    return {
        name: None if value == NONE else value for name, value in given.items() if value is not None
    }


def principal_ls(args: argparse.Namespace) -> int:
    """List principals."""
    with client_of(args) as client:
        found = client.principals.list()
    if args.json:
        print_json(found)
    elif args.quiet:
        for principal in found:
            print(principal.principal_id)
    else:
        print_table(
            ["ID", "KIND", "NAME", "PROJECT", "STATE", "AGE"],
            [
                [
                    one.principal_id,
                    one.kind,
                    one.name,
                    one.project_id,
                    "disabled" if one.disabled else "enabled",
                    age(one.created_at),
                ]
                for one in found
            ],
        )
    return _exit.OK


def principal_show(args: argparse.Namespace) -> int:
    """A principal and what it is granted."""
    with client_of(args) as client:
        found: PrincipalInfo = client.principals.get(args.principal)
    if args.json:
        print_json(found)
        return _exit.OK
    print(f"{found.kind} {found.name}" + (", disabled" if found.disabled else ""))
    print_table(
        ["PROJECT", "ROLE", "RIGHTS", "BY", "AGE"],
        [
            [
                grant.project_id,
                grant.role or "-",
                ", ".join(grant.rights) or "-",
                grant.granted_by,
                age(grant.created_at),
            ]
            for grant in found.grants
        ],
    )
    return _exit.OK


def principal_create(args: argparse.Namespace) -> int:
    """Make a principal."""
    with client_of(args) as client:
        made = client.principals.create(args.name, kind=args.kind)
    if args.json:
        print_json(made)
    else:
        print(made.principal_id)
    return _exit.OK


def principal_grant(args: argparse.Namespace) -> int:
    """Let a principal act in a project."""
    with client_of(args) as client:
        made = client.principals.grant(
            args.principal, _project(client, args.project), role=args.role, rights=args.right
        )
    if args.json:
        print_json(made)
    return _exit.OK


def principal_revoke(args: argparse.Namespace) -> int:
    """Take back what a principal may do in a project."""
    with client_of(args) as client:
        if not client.principals.revoke(args.principal, _project(client, args.project)):
            raise NotFound("It is granted nothing there.")
    return _exit.OK


def principal_key(args: argparse.Namespace) -> int:
    """Make a key of a principal."""
    with client_of(args) as client:
        made = client.principals.create_key(args.principal, args.name, project_id=args.project)
    if args.json:
        print_json(made)
    else:
        print(made.key)
    return _exit.OK


def principal_disable(args: argparse.Namespace) -> int:
    """Refuse a principal's keys."""
    with client_of(args) as client:
        client.principals.set_disabled(args.principal, True)
    return _exit.OK


def principal_enable(args: argparse.Namespace) -> int:
    """Accept a principal's keys again."""
    with client_of(args) as client:
        client.principals.set_disabled(args.principal, False)
    return _exit.OK


def principal_rm(args: argparse.Namespace) -> int:
    """Remove principals."""
    with client_of(args) as client:

        def remove(name: str) -> None:
            if not client.principals.delete(name):
                raise NotFound(f"There is no principal {name}.")

        return remove_each(args, args.principals, remove)


def roles(args: argparse.Namespace) -> int:
    """The rights of each role."""
    with client_of(args) as client:
        found = client.principals.roles()
    if args.json:
        print_json(found)
    else:
        for name, rights in found.items():
            print(f"{name:<10} {', '.join(rights)}")
    return _exit.OK


def token_create(args: argparse.Namespace) -> int:
    """Make a token."""
    with client_of(args) as client:
        made = client.tokens.create(
            name=args.name,
            ttl_s=args.ttl,
            rights=args.right or None,
            projects=args.project or None,
            sandbox_id=args.sandbox,
        )
    if args.json:
        print_json(made)
    else:
        print(made.token)
    return _exit.OK


def token_ls(args: argparse.Namespace) -> int:
    """List tokens."""
    with client_of(args) as client:
        found = client.tokens.list()
    if args.json:
        print_json(found)
    elif args.quiet:
        for token in found:
            print(token.token_id)
    else:
        print_table(
            ["ID", "NAME", "SANDBOX", "RIGHTS", "ENDS IN"],
            [
                [
                    token.token_id,
                    token.name,
                    token.sandbox_id or "-",
                    ", ".join(token.rights),
                    age(token.expires_at),
                ]
                for token in found
            ],
        )
    return _exit.OK


def token_rm(args: argparse.Namespace) -> int:
    """End tokens."""
    with client_of(args) as client:

        def remove(name: str) -> None:
            if not client.tokens.revoke(name):
                raise NotFound(f"There is no token {name}.")

        return remove_each(args, args.tokens, remove)


def whoami(args: argparse.Namespace) -> int:
    """Whom the key or token stands for."""
    with client_of(args) as client:
        found = client.projects.caller()
    if args.json:
        print_json(found)
        return _exit.OK
    facts = {
        "project": f"{found.project} ({found.project_id})",
        "principal": found.principal_id or "-",
        "key": found.key_id,
        "token": found.token_id or "-",
        "sandbox": found.sandbox_id or "all",
        "ends": "-" if found.expires_at is None else found.expires_at.isoformat(),
        "operator": "yes" if found.operator else "no",
        "rights": ", ".join(found.rights),
    }
    for name, value in facts.items():
        print(f"{name:<10}{value}")
    return _exit.OK


def audit_ls(args: argparse.Namespace) -> int:
    """List entries."""
    with client_of(args) as client:
        found = list(itertools.islice(_entries(client, args), args.limit))
    if args.json:
        print_json(found)
        return _exit.OK
    print_table(
        ["SEQ", "TIME", "ACTOR", "PROJECT", "ACTION", "OBJECT", "OUTCOME"],
        [
            [
                str(entry.seq),
                datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="seconds"),
                entry.actor_id or "-",
                entry.project_id or "-",
                entry.action,
                entry.object or "-",
                entry.outcome,
            ]
            for entry in found
        ],
    )
    return _exit.OK


def audit_export(args: argparse.Namespace) -> int:
    """Print entries as lines of JSON."""
    with client_of(args) as client:
        for entry in _entries(client, args):
            sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
    return _exit.OK


def _entries(client: Client, args: argparse.Namespace) -> Iterator[AuditEntry]:
    return client.audit.entries(
        actor=args.actor,
        object=args.object,
        outcome=args.outcome,
        since=args.since,
        until=args.until,
        after=args.after,
    )


def audit_verify(args: argparse.Namespace) -> int:
    """Check a log, on the server or in a file."""
    if args.file is not None:
        verdict = _verify_file(Path(args.file))
    else:
        with client_of(args) as client, waiting("Reading the log..."):
            verdict = client.audit.verify()
    if args.json:
        print_json(verdict)
    elif verdict.ok:
        print(f"{verdict.entries} entries are as they were written; head {verdict.head_hash}")
    else:
        print(f"The log is not as it was written: {verdict.fault}", file=sys.stderr)
    return _exit.OK if verdict.ok else FOUND_FAULT


def _verify_file(path: Path) -> AuditVerdict:
    decode = msgspec.json.Decoder(AuditEntry).decode
    with path.open("rb") as file:
        try:
            return verify_audit(decode(line) for line in file if line.strip())
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise _exit.Refused(f"{path} is no export of an audit log: {exc}") from exc
