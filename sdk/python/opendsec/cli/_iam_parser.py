# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec project``, ``principal``, ``token`` and ``audit``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import _command, _group

NONE = "none"
KINDS = ("person", "service", "agent")
ROLES = ("owner", "admin", "developer", "viewer", "agent")
QUOTA = {
    "sandboxes": ("COUNT", "sandboxes that are not paused, at one time"),
    "cpu": ("COUNT", "processors"),
    "memory_mb": ("MIB", "memory"),
    "disk_mb": ("MIB", "disk, of paused sandboxes too"),
    "gpu": ("COUNT", "GPUs"),
    "egress_mb": ("MIB", "sent in a day (UTC)"),
    "creates_per_s": ("COUNT", "creates per second"),
}
PROJECT_HELP = "id of the project"
PRINCIPAL_HELP = "id of the principal"


def add_iam(commands: Any) -> None:
    """Add the commands and those below them."""
    _add_project(commands)
    _add_principal(commands)
    _add_token(commands)
    _add_audit(commands)


def _add_project(commands: Any) -> None:
    inner = _group(
        commands,
        "project",
        "projects that nest, their limits and their use",
        example="  opendsec project create training --sandboxes 500 --cpu 200\n"
        "  opendsec project ls\n"
        "  OPENDSEC_PROJECT_ID=p… opendsec create",
    )
    p = _command(inner, "ls", "_iam:project_ls", "list the project in use and all below it")
    p.add_argument("-a", "--all", action="store_true", help="closed ones too")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p = _command(inner, "show", "_iam:project_show", "a project with its limits and use")
    p.add_argument("project", metavar="PROJECT", nargs="?", help=f"{PROJECT_HELP} (default: yours)")
    p = _command(inner, "create", "_iam:project_create", "make a project below yours")
    p.add_argument("name", metavar="NAME", help="unique under its parent")
    p.add_argument("--parent", metavar="PROJECT", help="make it below this one")
    _limits(p)
    p = _command(inner, "set", "_iam:project_set", "rename a project, or change its limits")
    p.add_argument("project", metavar="PROJECT", help=PROJECT_HELP)
    p.add_argument("--name", help="its new name")
    _limits(p)
    p = _command(inner, "close", "_iam:project_close", "close projects that have nothing left")
    p.add_argument("projects", metavar="PROJECT", nargs="+", help=PROJECT_HELP)
    p = _command(inner, "key", "_iam:project_key", "make an API key of a project, and print it")
    p.add_argument("project", metavar="PROJECT", help=PROJECT_HELP)
    p.add_argument("--name", default="cli", help="for people (default: cli)")


def _add_principal(commands: Any) -> None:
    inner = _group(
        commands,
        "principal",
        "people, services and agents, and what they may do where",
        example="  id=$(opendsec principal create ada --kind person)\n"
        "  opendsec principal grant $id --project p… --role developer\n"
        "  opendsec principal key $id",
    )
    p = _command(inner, "ls", "_iam:principal_ls", "list principals")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p = _command(inner, "show", "_iam:principal_show", "a principal and what it is granted")
    p.add_argument("principal", metavar="PRINCIPAL", help=PRINCIPAL_HELP)
    p = _command(inner, "create", "_iam:principal_create", "make a principal, and print its id")
    p.add_argument("name", metavar="NAME", help="unique in its project")
    p.add_argument("--kind", choices=KINDS, default="agent", help="what it is (default: agent)")
    p = _command(inner, "grant", "_iam:principal_grant", "let a principal act in a project")
    p.add_argument("principal", metavar="PRINCIPAL", help=PRINCIPAL_HELP)
    p.add_argument("--project", metavar="PROJECT", help=f"{PROJECT_HELP} (default: yours)")
    p.add_argument("--role", choices=ROLES, help="what it may do")
    p.add_argument(
        "--right",
        action="append",
        default=[],
        metavar="RIGHT",
        help="such as sandboxes:read; may be repeated",
    )
    p = _command(
        inner, "revoke", "_iam:principal_revoke", "take back what a principal may do in a project"
    )
    p.add_argument("principal", metavar="PRINCIPAL", help=PRINCIPAL_HELP)
    p.add_argument("--project", metavar="PROJECT", help=f"{PROJECT_HELP} (default: yours)")
    p = _command(inner, "key", "_iam:principal_key", "make an API key of a principal, and print it")
    p.add_argument("principal", metavar="PRINCIPAL", help=PRINCIPAL_HELP)
    p.add_argument("--name", default="cli", help="for people (default: cli)")
    p.add_argument("--project", metavar="PROJECT", help="where it acts by itself")
    for name, text in (("disable", "refuse a principal's keys"), ("enable", "accept them again")):
        p = _command(inner, name, f"_iam:principal_{name}", text)
        p.add_argument("principal", metavar="PRINCIPAL", help=PRINCIPAL_HELP)
    p = _command(inner, "rm", "_iam:principal_rm", "remove principals with their keys and tokens")
    p.add_argument("principals", metavar="PRINCIPAL", nargs="+", help=PRINCIPAL_HELP)
    _command(inner, "roles", "_iam:roles", "the rights of each role")


def _add_token(commands: Any) -> None:
    inner = _group(
        commands,
        "token",
        "short-lived parts of what you may do",
        example="  opendsec token create --ttl 900 --right sandboxes:read\n"
        "  OPENDSEC_API_KEY=$(opendsec token create --sandbox ID) opendsec exec ID ls",
    )
    p = _command(inner, "create", "_iam:token_create", "make a token, and print it")
    p.add_argument("--name", default="cli", help="for people (default: cli)")
    p.add_argument(
        "--ttl", type=int, metavar="SECONDS", help="how long it is good (default: an hour)"
    )
    p.add_argument(
        "--right",
        action="append",
        default=[],
        metavar="RIGHT",
        help="such as sandboxes:read; may be repeated (default: all of yours)",
    )
    p.add_argument(
        "--project",
        action="append",
        default=[],
        metavar="PROJECT",
        help="where it is good; may be repeated (default: yours)",
    )
    p.add_argument("--sandbox", metavar="ID", help="the only sandbox that it reaches")
    p = _command(inner, "ls", "_iam:token_ls", "list the tokens that are good now")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p = _command(inner, "rm", "_iam:token_rm", "end tokens now, with all that they made")
    p.add_argument("tokens", metavar="TOKEN", nargs="+", help="id of the token")
    _command(inner, "whoami", "_iam:whoami", "whom your key or token stands for")


def _add_audit(commands: Any) -> None:
    inner = _group(
        commands,
        "audit",
        "who did what, and how it went",
        example="  opendsec audit ls --object ID\n"
        "  opendsec audit export > audit.jsonl\n"
        "  opendsec audit verify --file audit.jsonl",
    )
    p = _command(inner, "ls", "_iam:audit_ls", "list entries, oldest first")
    _filters(p)
    p.add_argument("--limit", type=int, default=100, metavar="COUNT", help="at most (default: 100)")
    p = _command(inner, "export", "_iam:audit_export", "print entries as lines of JSON")
    _filters(p)
    p = _command(
        inner,
        "verify",
        "_iam:audit_verify",
        "check the log; exit code 1 if it was changed",
    )
    p.add_argument("--file", metavar="FILE", help="a whole export, checked without the server")


def _filters(p: argparse.ArgumentParser) -> None:
    p.add_argument("--actor", metavar="ID", help="principal, or key of a project")
    p.add_argument("--object", metavar="ID", help="what calls were about")
    p.add_argument("--outcome", metavar="CODE", help="`ok`, or an error's code")
    p.add_argument("--since", type=float, metavar="SECONDS", help="Unix time")
    p.add_argument("--until", type=float, metavar="SECONDS", help="Unix time")
    p.add_argument("--after", type=int, default=0, metavar="SEQ", help="after this entry")


def _limits(p: argparse.ArgumentParser) -> None:
    for name, (metavar, text) in QUOTA.items():
        option = "--" + name.removesuffix("_mb").replace("_", "-")
        p.add_argument(
            option,
            dest=f"quota_{name}",
            type=_limit,
            metavar=metavar,
            help=f"{text}; `none` takes the limit away",
        )


def _limit(text: str) -> float | str:
    if text == NONE:
        return NONE
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or `{NONE}`, not `{text}`") from None
    return int(value) if value.is_integer() else value
