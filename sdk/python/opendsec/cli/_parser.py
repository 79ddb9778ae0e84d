# SPDX-License-Identifier: Apache-2.0
"""The command line's grammar. Standard library only, so that help and completion are fast."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from opendsec._version import __version__

from . import _exit

SHELLS = ("bash", "zsh", "fish")
ON_TIMEOUT = ("kill", "pause")
STATE_MODES = ("full", "filesystem")
SANDBOX_HELP = "id of the sandbox"


class _ProgramParser(argparse.ArgumentParser):
    """A parser whose options end where the program to run begins, as with ``docker run``.

    ``program_after`` positionals come first; what follows them, or ``--``, is the program and its
    arguments, taken as it stands.
    """

    program_after = 0

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        own, program = self._split(list(args or ()))
        namespace, unknown = super().parse_known_args(own, namespace)
        namespace.program = program
        return namespace, unknown

    def _split(self, args: list[str]) -> tuple[list[str], list[str]]:
        takes_value = {
            option: action.nargs is None
            for action in self._actions
            for option in action.option_strings
        }
        positionals = 0
        index = 0
        while index < len(args):
            word = args[index]
            if word == "--":
                return args[:index], args[index + 1 :]
            if word.startswith("-") and word != "-":
                index += 1 + (takes_value.get(word, False) or _cluster_wants(word, takes_value))
                continue
            if positionals == self.program_after:
                return args[:index], args[index:]
            positionals += 1
            index += 1
        return args, []


def _cluster_wants(word: str, takes_value: dict[str, bool]) -> bool:
    """Whether the last of grouped short options (``-itu root``) takes the next word."""
    if word.startswith("--") or len(word) <= 2:
        return False
    for position, letter in enumerate(word[1:], start=1):
        if takes_value.get(f"-{letter}", False):
            return position == len(word) - 1
    return False


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    # It uses the pieces below, so it can only come after them.
    from ._adapters_parser import add_adapters
    from ._batch_parser import add_batch
    from ._fn_parser import add_fn
    from ._group_parser import add_group
    from ._iam_parser import add_iam
    from ._node_parser import add_node
    from ._task_parser import add_task
    from ._template_parser import add_template
    from ._trajectory_parser import add_trajectory

    parser = argparse.ArgumentParser(
        prog="opendsec",
        description="Isolated sandboxes from the command line.",
        epilog=_exit.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"opendsec {__version__}")
    parser.add_argument(
        "--url", help="address of the server (default: OPENDSEC_API_URL, E2B_API_URL, local)"
    )
    parser.set_defaults(handler=None, json=False, runs_program=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command_name")
    _add_run(commands)
    _add_create(commands)
    _add_listing(commands)
    _add_exec(commands)
    _add_files(commands)
    add_template(commands)
    add_task(commands)
    add_trajectory(commands)
    add_fn(commands)
    add_node(commands)
    _add_state(commands)
    _add_images(commands)
    _add_kill(commands)
    add_batch(commands)
    add_group(commands)
    add_adapters(commands)
    add_iam(commands)
    _add_about(commands)
    return parser


def _command(
    commands: Any,
    name: str,
    handler: str,
    text: str,
    *,
    example: str = "",
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    commands._parser_class = parser_class
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n{example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    # Also understood here, where people look for it; SUPPRESS keeps the value given before.
    parser.add_argument("--url", default=argparse.SUPPRESS, help="address of the server")
    parser.set_defaults(handler=handler)
    return parser


def _group(commands: Any, name: str, text: str, *, example: str, description: str = "") -> Any:
    """A command that has others below it; those are added to what comes back."""
    # Made by a plain parser: the class of the last command is otherwise kept.
    commands._parser_class = argparse.ArgumentParser
    parser = commands.add_parser(
        name,
        help=text,
        description=description or text[0].upper() + text[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # Without a subcommand there is nothing to do but to say which there are.
    return parser.add_subparsers(title="commands", metavar="COMMAND", dest="action", required=True)


def _add_run(commands: Any) -> None:
    p = _command(
        commands,
        "run",
        "_programs:run",
        "create a sandbox, run a program in it, remove it",
        example="  opendsec run -c 'print(6 * 7)'\n"
        "  opendsec run -f train.py -- --epochs 3\n"
        "  echo hi | opendsec run --no-network -- tr a-z A-Z",
        parser_class=_ProgramParser,
    )
    p.set_defaults(runs_program=True)
    source = p.add_mutually_exclusive_group()
    source.add_argument("-c", dest="code", metavar="CODE", help="Python code to run")
    source.add_argument(
        "-f", "--file", metavar="FILE", help="local script to run (.py, .js, .sh, or executable)"
    )
    _creation_options(p, timeout_s=3600)
    _terminal_options(p)
    p.add_argument("program", nargs="*", help="program and arguments; without it -c or -f")


def _add_create(commands: Any) -> None:
    p = _command(
        commands,
        "create",
        "_sandboxes:create",
        "create a sandbox and print its id",
        example="  id=$(opendsec create --timeout 600 --label demo)",
    )
    _creation_options(p, timeout_s=300)


def _creation_options(p: argparse.ArgumentParser, *, timeout_s: int) -> None:
    source = p.add_mutually_exclusive_group()
    source.add_argument("--template", default="base", help="what it is made from (default: base)")
    source.add_argument(
        "--from-snapshot", metavar="SNAPSHOT", help="start from a snapshot, by its id or name"
    )
    source.add_argument(
        "--image", metavar="IMAGE", help="start from an image, such as python:3.12-slim"
    )
    p.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="IMAGE",
        help="image or template to put on top; may be repeated, the last wins",
    )
    p.add_argument(
        "--start-image", action="store_true", help="start the image's own program as well"
    )
    p.add_argument(
        "--ready",
        type=_ready,
        metavar="PORT|URL|COMMAND",
        help="with --start-image: wait until something listens, answers, or succeeds",
    )
    p.add_argument(
        "--timeout",
        type=_seconds,
        default=timeout_s,
        metavar="SECONDS",
        help=f"its time runs out after so long (default: {timeout_s})",
    )
    p.add_argument(
        "--idle-timeout", type=_seconds, metavar="SECONDS", help="the same when unused for so long"
    )
    p.add_argument(
        "--on-timeout",
        choices=ON_TIMEOUT,
        default="kill",
        help="what happens when its time runs out (default: kill)",
    )
    p.add_argument(
        "--pause-mode", choices=STATE_MODES, help="what a pause by time-out keeps (default: full)"
    )
    p.add_argument(
        "--auto-resume", action="store_true", help="a request to the paused sandbox resumes it"
    )
    p.add_argument("--cpu", type=float, metavar="CORES", help="cores, such as 0.5")
    p.add_argument("--memory", type=_mib, metavar="SIZE", help="memory: MiB, or 2g")
    p.add_argument("--disk", type=_mib, metavar="SIZE", help="disk: MiB, or 10g")
    p.add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        type=_env_pair,
        metavar="NAME=VALUE",
        help="environment; NAME alone takes the value from here",
    )
    p.add_argument("--no-network", action="store_true", help="no internet")
    p.add_argument("--allow", action="append", default=[], metavar="CIDR", help="open an address")
    p.add_argument("--deny", action="append", default=[], metavar="CIDR", help="close an address")
    p.add_argument(
        "--label", action="append", default=[], metavar="WORD", help="your own word, to find it by"
    )
    p.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="your own fact, to find it by",
    )
    p.add_argument("--task", metavar="JOB", help="id of the job it belongs to")
    p.add_argument(
        "--node-label", action="append", default=[], type=_pair, metavar="KEY=VALUE",
        help="a label that its node must have",
    )  # fmt: skip
    p.add_argument(
        "--backend", metavar="NAME", help="how it is isolated; `opendsec info` lists them"
    )
    p.add_argument(
        "--user-data",
        metavar="FILE",
        help="of a full virtual machine: for its cloud-init; - reads the input",
    )
    p.add_argument(
        "--firmware",
        choices=("bios", "uefi", "direct"),
        help="of a full virtual machine: how its image starts",
    )
    p.add_argument("--idempotency-key", metavar="KEY", help="a second create finds the first")


def _terminal_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("-i", "--interactive", action="store_true", help="pass the input on")
    p.add_argument("-t", "--tty", action="store_true", help="run on a terminal (with -i)")
    p.add_argument("-w", "--workdir", metavar="DIR", help="directory in the sandbox")
    p.add_argument("-u", "--user", help="account in the sandbox")


def _add_exec(commands: Any) -> None:
    p = _command(
        commands,
        "exec",
        "_programs:exec_",
        "run a program in a sandbox",
        example="  opendsec exec ID -- uname -a\n  opendsec exec -it ID bash",
        parser_class=_ProgramParser,
    )
    p.program_after = 1  # type: ignore[attr-defined]
    p.set_defaults(runs_program=True)
    _terminal_options(p)
    p.add_argument("-d", "--detach", action="store_true", help="print the pid and return")
    p.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="kill it after so long")
    p.add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        type=_env_pair,
        metavar="NAME=VALUE",
        help="environment; NAME alone takes the value from here",
    )
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p.add_argument("program", nargs="*", help="program and arguments")
    p = _command(commands, "shell", "_programs:shell", "open a terminal in a sandbox")
    p.set_defaults(runs_program=True)
    p.add_argument("-u", "--user", help="account in the sandbox")
    p.add_argument("-w", "--workdir", metavar="DIR", help="directory in the sandbox")
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)


def _add_listing(commands: Any) -> None:
    p = _command(commands, "ls", "_sandboxes:ls", "list sandboxes")
    p.add_argument("-a", "--all", action="store_true", help="ended ones too")
    p.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="STATE",
        help="only in this state, such as running or paused; may be repeated",
    )
    _filter_options(p)
    p.add_argument("--template", metavar="NAME", help="only from this template")
    p.add_argument("--limit", type=int, metavar="COUNT", help="at most so many")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p.add_argument(
        "-w",
        "--watch",
        action="store_true",
        help="go on until Ctrl-C: on a terminal the table, drawn anew; else a line per change",
    )
    p = _command(commands, "ps", "_sandboxes:ps", "list processes of a sandbox, or of all")
    p.add_argument("sandbox", metavar="ID", nargs="?", help=f"{SANDBOX_HELP} (default: all)")
    p = _command(commands, "info", "_info:info", "describe a sandbox, or the server")
    p.add_argument("sandbox", metavar="ID", nargs="?", help=f"{SANDBOX_HELP} (default: the server)")
    p = _command(commands, "logs", "_sandboxes:logs", "what happened to a sandbox, and why")
    p.add_argument("-f", "--follow", action="store_true", help="go on until it has ended")
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p = _command(commands, "console", "_sandboxes:console", "what a machine's console printed")
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p = _command(commands, "metrics", "_sandboxes:metrics", "CPU, memory and disk of a sandbox")
    p.add_argument("--all", action="store_true", help="every kept reading, not only the last")
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    _command(commands, "templates", "_sandboxes:templates", "list templates")


def _filter_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--task", metavar="JOB", help="only of this job")
    p.add_argument(
        "--label", action="append", default=[], metavar="WORD", help="only with this label"
    )
    p.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="only with this fact",
    )


def _add_state(commands: Any) -> None:
    p = _command(
        commands,
        "pause",
        "_state:pause",
        "free a sandbox's memory and keep the rest",
        example="  opendsec pause ID\n  opendsec pause --mode filesystem ID",
    )
    _mode_option(p, "full keeps its processes, filesystem the disk alone (default: full)")
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p = _command(commands, "resume", "_state:resume", "let a paused sandbox run on")
    p.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="its time runs out after so long (default: the server's)",
    )
    p.add_argument(
        "--reboot", action="store_true", help="forget the kept memory and start from the disk"
    )
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p = _command(
        commands,
        "fork",
        "_state:fork",
        "make copies of a running sandbox and print their ids",
        example="  opendsec fork ID -n 8 --label try",
    )
    p.add_argument(
        "-n", "--count", type=int, default=1, metavar="COUNT", help="how many (default: 1)"
    )
    _mode_option(p, "full copies its processes too, filesystem the disk alone (default: full)")
    p.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="their time runs out after so long (default: the server's)",
    )
    p.add_argument(
        "--label", action="append", default=[], metavar="WORD", help="label of the copies"
    )
    p.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="fact of the copies",
    )
    p.add_argument(
        "--idempotency-key", metavar="KEY", help="a second fork finds the first's copies"
    )
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p = _command(
        commands,
        "pack",
        "_state:pack",
        "make an image of a sandbox's changes and print its digest",
        example="  opendsec pack ID --name workspace:v2\n  opendsec create --image workspace:v2",
    )
    p.add_argument("--name", metavar="NAME[:TAG]", help="a name to create from")
    p.add_argument("--squash", action="store_true", help="one layer of everything")
    p.add_argument(
        "--no-scrub",
        action="store_true",
        help="keep shell histories, host name and the like",
    )
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    _add_snapshot(commands)


def _add_images(commands: Any) -> None:
    inner = _group(
        commands,
        "image",
        "container images on the server: list, pull, inspect, remove, prune, push",
        description="Container images on the server. One is named by its reference, its digest or "
        "the digest's first 12 characters, or by the name that `pack` gave it.",
        example="  opendsec image pull python:3.12-slim\n"
        "  opendsec run --image python:3.12-slim python -V",
    )
    p = _command(inner, "ls", "_images:ls", "list images")
    p.add_argument("-q", "--quiet", action="store_true", help="digests only")
    p = _command(inner, "pull", "_images:pull", "have the server pull an image, print its digest")
    p.add_argument("reference", metavar="REFERENCE", help="as docker takes it")
    _add_login(p)
    p = _command(inner, "inspect", "_images:inspect", "show all that is known of an image")
    p.add_argument("image", metavar="IMAGE", help="reference, digest or name")
    p = _command(inner, "rm", "_images:rm", "remove images; by one of several names, that name")
    p.add_argument("images", metavar="IMAGE", nargs="+", help="reference, digest or name")
    p = _command(inner, "prune", "_images:prune", "remove the images that nothing uses")
    p.add_argument(
        "--unused-for", metavar="SECONDS", type=float, default=0.0,
        help="only those not used for so long (default: all)",
    )  # fmt: skip
    p = _command(inner, "push", "_images:push", "send an image to a registry, print its digest")
    p.add_argument("image", metavar="IMAGE", help="reference, digest or name")
    p.add_argument("reference", metavar="REFERENCE", help="where to: HOST/NAME:TAG")
    _add_login(p)


def _add_login(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-u", "--user", metavar="NAME", help="user at the registry")
    parser.add_argument(
        "--password-stdin", action="store_true", help="read the password from standard input"
    )


def _add_snapshot(commands: Any) -> None:
    inner = _group(
        commands,
        "snapshot",
        "save sandboxes' states, and list and remove what was saved",
        example="  opendsec snapshot create ID --name warm\n  opendsec create --from-snapshot warm",
    )
    p = _command(inner, "create", "_state:snapshot_create", "save a sandbox's state, print its id")
    p.add_argument("--name", metavar="NAME[:TAG]", help="a name to find it by")
    _mode_option(p, "full saves its processes too, filesystem the disk alone (default: full)")
    p.add_argument(
        "--idempotency-key", metavar="KEY", help="a second try finds the first's snapshot"
    )
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p = _command(inner, "ls", "_state:snapshot_ls", "list snapshots")
    p.add_argument("--sandbox", metavar="ID", help="only of this sandbox")
    p.add_argument("--name", metavar="NAME", help="only with this name")
    p.add_argument("--limit", type=int, metavar="COUNT", help="at most so many")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p = _command(inner, "rm", "_state:snapshot_rm", "remove snapshots")
    p.add_argument("snapshots", metavar="SNAPSHOT", nargs="+", help="id or name of a snapshot")


def _mode_option(p: argparse.ArgumentParser, text: str) -> None:
    p.add_argument("--mode", choices=STATE_MODES, default="full", help=text)


def _add_files(commands: Any) -> None:
    p = _command(
        commands,
        "cp",
        "_copy:cp",
        "copy files and directories into or out of a sandbox",
        example="  opendsec cp ./data ID:/home/user/data\n"
        "  opendsec cp ID:/var/log/app.log -\n"
        "  tar c . | opendsec cp - ID:/tmp/all.tar",
    )
    p.add_argument("-u", "--user", help="account in the sandbox")
    p.add_argument("source", help="PATH, ID:PATH, or - for standard input")
    p.add_argument("target", help="PATH, ID:PATH, or - for standard output")


def _add_kill(commands: Any) -> None:
    p = _command(commands, "kill", "_sandboxes:kill", "end sandboxes")
    p.add_argument("sandboxes", metavar="ID", nargs="*", help="ids of the sandboxes")
    p.add_argument("--all", action="store_true", help="every sandbox of the project")
    _filter_options(p)


def _add_about(commands: Any) -> None:
    p = _command(commands, "url", "_about:url", "address of a port of a sandbox")
    p.add_argument("sandbox", metavar="ID", help=SANDBOX_HELP)
    p.add_argument("port", type=int, metavar="PORT", help="where its service listens")
    _command(
        commands,
        "env",
        "_about:env",
        "print the settings the E2B SDKs need, as shell exports",
        example='  eval "$(opendsec env)"',
    )
    _command(commands, "doctor", "_doctor:doctor", "check this machine and the server")
    p = _command(
        commands,
        "completion",
        "_about:completion",
        "print the completion script of a shell",
        example="  opendsec completion bash > /etc/bash_completion.d/opendsec",
    )
    p.add_argument("shell", choices=SHELLS, help="which shell")


# --- value types: their names appear in error messages ---------------------------


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name, value


def _ready(text: str) -> dict[str, Any]:
    if text.isdigit():
        return {"port": int(text)}
    return {"url" if text.startswith(("http://", "https://")) else "command": text}


def _env_pair(text: str) -> tuple[str, str]:
    if text and "=" not in text:
        if text not in os.environ:
            raise argparse.ArgumentTypeError(f"{text} is not set here; write {text}=VALUE")
        return text, os.environ[text]
    return _pair(text)


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 5m or 2h")
    return int(value) if value.is_integer() else value


def _mib(text: str) -> int:
    units = {"m": 1, "g": 1024, "t": 1024 * 1024}
    lower = text.lower().removesuffix("ib").removesuffix("b")
    number, unit = (lower[:-1], units[lower[-1]]) if lower[-1:] in units else (lower, 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512, 512m or 2g")
    return int(value)
