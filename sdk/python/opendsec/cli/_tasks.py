# SPDX-License-Identifier: Apache-2.0
"""``task``: all sandboxes of a job, as one."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from opendsec import (
    KEEP,
    Client,
    InvalidRequest,
    TaskInfo,
    TaskOperation,
    TaskOperationInfo,
    TaskOperationNotFound,
    TaskSandboxes,
)

from . import _exit
from ._output import age, print_json, print_table, size, span
from ._session import client_of
from ._task_parser import NONE

SHOW_EVERY_S = 0.2
ERRORS_SHOWN_MAX = 5


def ls(args: argparse.Namespace) -> int:
    """List tasks."""
    with client_of(args) as client:
        found = list(client.tasks.list(states=args.state, limit=args.limit))
    if args.json:
        print_json(found)
    elif args.quiet:
        for task in found:
            print(task.task_id)
    else:
        print_table(
            ["TASK", "STATE", "LIVE", "MADE", "CPU", "MEMORY", "AGE", "ENDS"],
            [_row(task) for task in found],
        )
    return _exit.OK


def _row(task: TaskInfo) -> list[str]:
    return [
        task.task_id,
        task.state,
        _counts(task.sandboxes.by_state),
        str(task.made),
        span(task.usage.cpu_seconds),
        f"{task.usage.memory_mb_seconds / 3_600 / 1_024:.2f} GiB·h",
        age(task.created_at),
        task.end_reason or age(task.deadline_at),
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "0"


def show(args: argparse.Namespace) -> int:
    """All about a task."""
    with client_of(args) as client:
        return _show(client.tasks.get(args.task), args)


def create(args: argparse.Namespace) -> int:
    """Make a task."""
    given = {name: None if value is KEEP else value for name, value in _limits_of(args).items()}
    with client_of(args) as client:
        return _show(client.tasks.create(args.task, **given), args)


def set(args: argparse.Namespace) -> int:
    """Change a task's limits."""
    with client_of(args) as client:
        return _show(client.tasks.set(args.task, reopen=args.reopen, **_limits_of(args)), args)


def _limits_of(args: argparse.Namespace) -> dict[str, Any]:
    sandboxes = args.sandboxes
    if isinstance(sandboxes, float):
        if sandboxes != int(sandboxes):
            raise InvalidRequest("--sandboxes: a whole number.")
        sandboxes = int(sandboxes)
    limits = {
        "deadline": args.deadline,
        "sandboxes_max": sandboxes,
        "cpu_seconds_max": args.cpu_seconds,
    }
    return {
        name: KEEP if value is None else None if value == NONE else value
        for name, value in limits.items()
    }


def _show(task: TaskInfo, args: argparse.Namespace) -> int:
    if args.json:
        print_json(task)
        return _exit.OK
    sandboxes, used = task.sandboxes, task.usage
    ended = ", ".join(
        f"{end.count} {end.reason or 'ended'}" + (f" ({end.fault})" if end.fault else "")
        for end in sandboxes.ended
    )
    state = task.state if task.end_reason is None else f"{task.state} ({task.end_reason})"
    budget = [] if task.sandboxes_max is None else [f"{task.sandboxes_max} sandboxes"]
    if task.cpu_seconds_max is not None:
        budget.append(f"{task.cpu_seconds_max:g} CPU seconds")
    facts = {
        "task": task.task_id,
        "state": state,
        "deadline": "-" if task.deadline_at is None else task.deadline_at.isoformat(),
        "budget": ", ".join(budget) or "-",
        "live": _counts(sandboxes.by_state),
        "backends": _counts(sandboxes.by_backend),
        "ended": ended or "0",
        "made": str(task.made),
        "cpu": f"{used.cpu_seconds:.2f} s",
        "memory": f"{used.memory_mb_seconds:.0f} MiB·s",
        "disk": size(used.disk_bytes),
        "egress": size(used.egress_bytes),
        "ingress": size(used.ingress_bytes),
        "operation": "-" if task.operation is None else _line(task.operation),
    }
    for name, value in facts.items():
        print(f"{name:<10}{value}")
    return _exit.OK


def pause(args: argparse.Namespace) -> int:
    """Pause a task."""
    with client_of(args) as client:
        return _follow(client.tasks.pause(args.task, mode=args.mode), args)


def resume(args: argparse.Namespace) -> int:
    """Resume a task."""
    with client_of(args) as client:
        return _follow(client.tasks.resume(args.task, timeout_s=args.timeout), args)


def kill(args: argparse.Namespace) -> int:
    """Kill a task."""
    with client_of(args) as client:
        return _follow(client.tasks.kill(args.task, end=not args.keep_open), args)


def follow(args: argparse.Namespace) -> int:
    """Follow an operation on a task."""
    args.detach = False
    with client_of(args) as client:
        name = args.operation or _newest(client, args.task)
        return _follow(client.tasks.operation(args.task, name), args)


def _newest(client: Client, task_id: str) -> str:
    found = client.tasks.operations(task_id)
    if not found:
        raise TaskOperationNotFound(f"Nothing was done to task {task_id} as a whole yet.")
    return found[0].operation_id


def _follow(operation: TaskOperation, args: argparse.Namespace) -> int:
    """Show progress to people, outcomes as JSON lines to programs; errors in any case."""
    if args.detach:
        if args.json:
            print_json(operation.info)
        else:
            print(operation.info.operation_id)
        return _exit.OK
    shown_at, failed, freed = 0.0, 0, 0
    people = sys.stderr.isatty() and not args.json
    for seen, outcome in enumerate(operation, 1):
        freed += outcome.memory_freed_bytes
        if args.json:
            print_json(outcome)
        elif outcome.error is not None:
            failed += 1
            if failed <= ERRORS_SHOWN_MAX:
                message = outcome.error.get("message", "failed")
                print(f"opendsec: {outcome.sandbox_id}: {message}", file=sys.stderr)
        if people and time.monotonic() - shown_at >= SHOW_EVERY_S:
            shown_at = time.monotonic()
            text = f"\r{operation.info.kind}: {seen} of {operation.info.asked}"
            sys.stderr.write(text + (f", {size(freed)} freed" if freed else "") + "\x1b[K")
            sys.stderr.flush()
    if people:
        sys.stderr.write("\r\x1b[K")
    if failed > ERRORS_SHOWN_MAX:
        print(f"opendsec: {failed - ERRORS_SHOWN_MAX} more failed", file=sys.stderr)
    if args.json:
        print_json({"done": operation.info})
    else:
        print(_line(operation.info))
    if operation.info.superseded_by is not None or operation.info.failed:
        return _exit.PLATFORM if operation.info.failed else _exit.USER
    return _exit.OK


def _line(info: TaskOperationInfo) -> str:
    text = f"{info.kind}: {info.done} of {info.asked} done"
    if info.failed:
        text += f", {info.failed} failed"
    if info.kind == "pause":
        text += f", {size(info.memory_freed_bytes)} memory freed"
    if info.superseded_by is not None:
        return f"{text}; then {info.superseded_by} took its place"
    return text if info.finished_at is not None else f"{text}, under way"


def wait(args: argparse.Namespace) -> int:
    """Wait for a task."""

    def changed(sandboxes: TaskSandboxes) -> None:
        if args.json:
            print_json({"sandboxes": sandboxes})
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r{_counts(sandboxes.by_state)}\x1b[K")
            sys.stderr.flush()

    with client_of(args) as client:
        reached = client.tasks.wait(
            args.task, args.until, timeout_s=args.timeout, on_change=changed
        )
    if sys.stderr.isatty() and not args.json:
        sys.stderr.write("\r\x1b[K")
    if args.json:
        print_json({"reached": reached})
    elif not reached:
        print(f"opendsec: not {args.until} within {args.timeout} s", file=sys.stderr)
    return _exit.OK if reached else _exit.USER
