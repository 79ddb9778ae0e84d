# SPDX-License-Identifier: Apache-2.0
"""Commands about sandboxes as a whole."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opendsec import (
    Client,
    OpendsecError,
    SandboxInfo,
    SandboxNotFound,
    SandboxPaused,
    Transition,
)

from . import _exit
from ._output import age, note, print_error, print_json, print_table, size, waiting
from ._session import client_of, creation_arguments, look_at
from ._watch import watch

KILLS_AT_ONCE = 16
FOLLOW_INTERVAL_S = 1.0
METRICS_KEPT_S = 3600
COLUMNS = [
    "ID",
    "STATE",
    "BACKEND",
    "TEMPLATE",
    "CPU",
    "MEMORY",
    "AGE",
    "LEFT",
    "TASK",
    "LABELS",
]


def create(args: argparse.Namespace) -> int:
    """Create a sandbox that stays."""
    with client_of(args) as client, waiting("Creating the sandbox..."):
        record = client.create(**creation_arguments(args)).record
    if args.json:
        print_json(record)
    else:
        print(record.sandbox_id)
    return _exit.OK


def ls(args: argparse.Namespace) -> int:
    """List sandboxes."""
    states = args.state or (("all",) if args.all else None)

    def read() -> list[SandboxInfo]:
        return list(
            client.list(
                states=states,
                task_id=args.task,
                labels=args.label,
                metadata=dict(args.metadata),
                template=args.template,
                limit=args.limit,
            )
        )

    with client_of(args) as client:
        if args.watch:
            if args.quiet or args.limit is not None:
                raise _exit.Refused("--watch shows all of them: leave --quiet and --limit out")
            watch(client, read, lambda found: _table(found, args.all), as_json=args.json)
        records = read()
    if args.json:
        print_json(records)
    elif args.quiet:
        for record in records:
            print(record.sandbox_id)
    else:
        print_table(*_table(records, args.all))
    return _exit.OK


def _table(records: Sequence[SandboxInfo], everything: bool) -> tuple[list[str], list[list[str]]]:
    # Why something ended is a column only where something has.
    reasons = everything or any(record.ended for record in records)
    columns = [*COLUMNS[:8], *(["REASON"] if reasons else []), *COLUMNS[8:]]
    return columns, [_row(record, reasons) for record in records]


def _row(record: SandboxInfo, reasons: bool) -> list[str]:
    endless = record.ended or record.asleep
    return [
        record.sandbox_id,
        record.state,
        record.backend,
        record.template or record.template_id,
        f"{record.cpu:g}",
        f"{record.memory_mb} MiB",
        age(record.created_at),
        "-" if endless else age(record.end_at),
        *([record.end_reason or "-"] if reasons else []),
        record.task_id or "-",
        ",".join(record.labels) or "-",
    ]


def ps(args: argparse.Namespace) -> int:
    """List processes started through the API."""
    found: list[dict[str, Any]] = []
    with client_of(args) as client:
        ids = [args.sandbox] if args.sandbox else _running_ids(client)
        for sandbox_id in ids:
            try:
                processes = look_at(client, sandbox_id).processes()
            except (SandboxNotFound, SandboxPaused):
                if args.sandbox:
                    raise
                continue  # It ended or was paused between the two calls.
            found.extend(
                {
                    "sandbox_id": sandbox_id,
                    "pid": process.pid,
                    "tag": process.tag,
                    "cwd": process.cwd,
                    "cmd": process.cmd,
                    "args": process.args,
                }
                for process in processes
            )
    if args.json:
        print_json(found)
    else:
        print_table(
            ["ID", "PID", "TAG", "COMMAND"],
            [
                [
                    entry["sandbox_id"],
                    str(entry["pid"]),
                    entry["tag"] or "-",
                    _one_line(" ".join([entry["cmd"], *entry["args"]])),
                ]
                for entry in found
            ],
        )
    return _exit.OK


def _running_ids(client: Client) -> list[str]:
    return [record.sandbox_id for record in client.list(states=("running",))]


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 100 else flat[:97] + "..."


def logs(args: argparse.Namespace) -> int:
    """Print the transitions of a sandbox."""
    shown = 0
    with client_of(args) as client:
        while True:
            transitions = client.transitions(args.sandbox)
            for transition in transitions[shown:]:
                _print_transition(transition, as_json=args.json)
            sys.stdout.flush()
            shown = len(transitions)
            ended = bool(transitions) and transitions[-1].to in ("ended", "failed")
            if not args.follow or ended:
                return _exit.OK
            time.sleep(FOLLOW_INTERVAL_S)


def _print_transition(transition: Transition, *, as_json: bool) -> None:
    if as_json:
        print_json(transition)
        return
    moment = transition.at.astimezone().isoformat(sep=" ", timespec="milliseconds")
    why = " ".join(filter(None, (transition.reason, transition.message, transition.cause)))
    print(f"{moment}  {transition.from_state or 'new':>9} -> {transition.to:9} {why}".rstrip())


def console(args: argparse.Namespace) -> int:
    """Print the end of what a machine printed on its serial console."""
    with client_of(args) as client:
        text = client.console(args.sandbox)
    if args.json:
        print_json({"text": text})
    else:
        sys.stdout.write(text)
    return _exit.OK


def metrics(args: argparse.Namespace) -> int:
    """Print readings of a sandbox."""
    with client_of(args) as client:
        start = time.time() - METRICS_KEPT_S if args.all else None
        samples = client.metrics(args.sandbox, start=start)
    if not args.all:
        samples = samples[-1:]
    if args.json:
        print_json(samples)
        return _exit.OK
    if not samples:
        note("No reading yet; one is taken every few seconds.")
    print_table(
        ["TIME", "CPU", "CPUS", "MEMORY", "MEMORY LIMIT", "CACHE", "DISK", "DISK LIMIT"],
        [
            [
                sample.at.astimezone().strftime("%H:%M:%S"),
                f"{sample.cpu_used_pct:.1f} %",
                f"{sample.cpu_count:g}",
                size(sample.memory_used_bytes),
                size(sample.memory_total_bytes),
                size(sample.memory_cache_bytes),
                size(sample.disk_used_bytes),
                size(sample.disk_total_bytes),
            ]
            for sample in samples
        ],
    )
    return _exit.OK


def templates(args: argparse.Namespace) -> int:
    """List templates."""
    with client_of(args) as client:
        found = client.templates()
    if args.json:
        print_json(found)
        return _exit.OK
    print_table(
        ["NAME", "ID", "CPU", "MEMORY", "DISK", "AGE"],
        [
            [
                template.name or "-",
                template.template_id,
                "-" if template.cpu is None else f"{template.cpu:g}",
                "-" if template.memory_mb is None else f"{template.memory_mb} MiB",
                "-" if template.disk_mb is None else f"{template.disk_mb} MiB",
                age(template.created_at),
            ]
            for template in found
        ],
    )
    return _exit.OK


def kill(args: argparse.Namespace) -> int:
    """End sandboxes by id or by filter."""
    filtered = args.all or args.task or args.label or args.metadata
    if bool(filtered) == bool(args.sandboxes):
        raise _exit.Refused("say which: either ids, or --all, --task, --label or --metadata.")
    with client_of(args) as client:
        ids = args.sandboxes or [
            record.sandbox_id
            for record in client.list(
                task_id=args.task,
                labels=args.label,
                metadata=dict(args.metadata),
            )
        ]
        with waiting("Ending..."), ThreadPoolExecutor(KILLS_AT_ONCE) as pool:
            outcomes = list(pool.map(lambda sandbox_id: _kill_one(client, sandbox_id), ids))
    return _report_kills(list(zip(ids, outcomes, strict=True)), args, named=bool(args.sandboxes))


def _kill_one(client: Client, sandbox_id: str) -> bool | OpendsecError:
    try:
        return client.kill(sandbox_id)
    except OpendsecError as error:
        return error


def _report_kills(
    outcomes: list[tuple[str, bool | OpendsecError]], args: argparse.Namespace, *, named: bool
) -> int:
    code = _exit.OK
    killed = []
    for sandbox_id, outcome in outcomes:
        if isinstance(outcome, OpendsecError):
            print_error(outcome, as_json=args.json)
            code = max(code, _exit.code_for(outcome, runs_program=False))
        elif outcome:
            killed.append(sandbox_id)
            if not args.json:
                print(sandbox_id)
        elif named:
            print_error(SandboxNotFound(f"There is no sandbox {sandbox_id}."), as_json=args.json)
            code = max(code, _exit.USER)
    if args.json:
        print_json({"killed": killed})
    return code
