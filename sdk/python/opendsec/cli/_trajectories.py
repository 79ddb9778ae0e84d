# SPDX-License-Identifier: Apache-2.0
"""``trajectory``: what was done in sandboxes, once, and whose fault it was."""

from __future__ import annotations

import argparse
import sys

import msgspec

from opendsec import Action, OutcomeSum

from . import _exit
from ._output import age, note, print_json, print_table
from ._session import client_of

COMMAND_CHARS_MAX = 60


def ls(args: argparse.Namespace) -> int:
    """List rollouts."""
    with client_of(args) as client:
        found = list(client.trajectories.list(task_id=args.task))
    if args.json:
        print_json(found)
    elif args.quiet:
        for one in found:
            print(one.rollout_id)
    else:
        print_table(
            ["ROLLOUT", "TASK", "SANDBOXES", "ACTIONS", "OPEN", "STEP", "LAST"],
            [
                [
                    one.rollout_id,
                    one.task_id or "-",
                    str(one.sandboxes),
                    str(one.actions),
                    str(one.open),
                    "-" if one.last_step is None else str(one.last_step),
                    age(one.last_at),
                ]
                for one in found
            ],
        )
    return _exit.OK


def show(args: argparse.Namespace) -> int:
    """List a sandbox's actions."""
    with client_of(args) as client:
        found = list(client.trajectories.of(args.sandbox).list())
    if args.json:
        print_json(found)
    else:
        print_table(
            ["SEQ", "ACTION", "STEP", "KIND", "STATE", "CAUSE", "FAULT", "WHAT"],
            [_row(action) for action in found],
        )
    return _exit.OK


def _row(action: Action) -> list[str]:
    asked = action.asked
    what = " ".join(asked.get("argv", [])) or asked.get("path") or action.snapshot_id or ""
    what = " ".join(str(what).split())
    return [
        str(action.seq),
        action.action_id,
        "-" if action.step is None else str(action.step),
        action.kind,
        action.state,
        action.cause or "-",
        action.fault or "-",
        what if len(what) <= COMMAND_CHARS_MAX else f"{what[:COMMAND_CHARS_MAX]}…",
    ]


def export(args: argparse.Namespace) -> int:
    """Write actions as lines of JSON."""
    encode = msgspec.json.Encoder().encode
    with client_of(args) as client:
        trajectories = client.trajectories
        actions = (
            trajectories.of(args.what).export() if args.sandbox else trajectories.export(args.what)
        )
        for action in actions:
            sys.stdout.write(encode(action).decode() + "\n")
    return _exit.OK


def run(args: argparse.Namespace) -> int:
    """Run a program once; the exit code is the program's."""
    if not args.program:
        raise _exit.Refused("say what to run, after the action's id.")
    with client_of(args) as client:
        action = client.trajectories.of(args.sandbox).exec(
            args.action,
            args.program,
            rollout_id=args.rollout,
            step=args.step,
            once=args.once,
            user=args.user,
            cwd=args.cwd,
            timeout_s=args.timeout,
        )
    if args.json:
        print_json(action)
    else:
        sys.stdout.write(action.stdout)
        sys.stderr.write(action.stderr)
    if action.timed_out:
        return _exit.TIMED_OUT
    if action.exit_code is not None:
        return action.exit_code
    return 128 + (action.signal or 0)


def resolve(args: argparse.Namespace) -> int:
    """Find out what became of an action, or state it."""
    happened = True if args.happened else False if args.not_run else None
    with client_of(args) as client:
        action = client.trajectories.of(args.sandbox).resolve(
            args.action, happened=happened, exit_code=args.exit_code
        )
    if args.json:
        print_json(action)
    else:
        print(f"{action.state} {action.cause or ''}".rstrip())
    return _exit.PLATFORM if action.state == "unknown" else _exit.OK


def forward(args: argparse.Namespace) -> int:
    """Bring a sandbox to where another one was."""
    counts = {"copied": 0, "ran": 0, "skipped": 0}
    diverged = 0
    with client_of(args) as client:
        steps = client.trajectories.of(args.sandbox).fast_forward(
            args.source, through=args.through, holds=args.holds, unknown=args.unknown
        )
        for step in steps:
            counts[step.how] += 1
            diverged += step.diverged
            if args.json:
                print_json(step)
            else:
                mark = " (ended in another way than before)" if step.diverged else ""
                print(f"{step.how} {step.action_id}{mark}")
    if not args.json:
        note(
            f"{counts['copied']} taken over, {counts['ran']} run again, "
            f"{counts['skipped']} left out, {diverged} ended in another way."
        )
    return _exit.OK


def outcomes(args: argparse.Namespace) -> int:
    """Outcomes of a job."""
    with client_of(args) as client:
        found = client.trajectories.outcomes(args.task)
    if args.json:
        print_json(found)
        return _exit.OK
    rows = [_sum("sandboxes", found.sandboxes), _sum("actions", found.actions)]
    print_table(["OF", "TOTAL", "USER", "PLATFORM", "CAPACITY", "NOBODY", "UNKNOWN"], rows)
    causes = [
        [what, count.state, count.cause or "-", count.fault or "-", str(count.count)]
        for what, of in (("sandboxes", found.sandboxes), ("actions", found.actions))
        for count in of.by_cause
    ]
    if causes:
        print()
        print_table(["OF", "STATE", "CAUSE", "FAULT", "COUNT"], causes)
    return _exit.OK


def _sum(what: str, of: OutcomeSum) -> list[str]:
    figures = (of.total, of.user, of.platform, of.capacity, of.none, of.unknown)
    return [what, *map(str, figures)]
