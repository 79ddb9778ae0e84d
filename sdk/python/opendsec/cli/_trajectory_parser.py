# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec trajectory``."""

from __future__ import annotations

from typing import Any

from ._parser import SANDBOX_HELP, _command, _group, _ProgramParser

ACTION_HELP = "the action's id"


def add_trajectory(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "trajectory",
        "what was done in sandboxes: recorded before it runs, and never done twice",
        example="  opendsec trajectory exec SANDBOX step-1 -- make test\n"
        "  opendsec trajectory show SANDBOX\n  opendsec trajectory outcomes train-7",
    )
    p = _command(inner, "ls", "_trajectories:ls", "list rollouts")
    p.add_argument("--task", metavar="JOB", help="only of this job")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p = _command(inner, "show", "_trajectories:show", "a sandbox's actions, also after its end")
    p.add_argument("sandbox", metavar="SANDBOX", help=SANDBOX_HELP)
    p = _command(inner, "export", "_trajectories:export", "write actions as JSON, one to a line")
    p.add_argument("what", metavar="ROLLOUT", help="id of the rollout")
    p.add_argument("--sandbox", action="store_true", help="ROLLOUT is the id of a sandbox")
    p = _command(
        inner,
        "exec",
        "_trajectories:run",
        "run a program once; the same id again prints what it printed",
        example="  opendsec trajectory exec SANDBOX step-1 -- make test",
        parser_class=_ProgramParser,
    )
    p.program_after = 2  # type: ignore[attr-defined]
    p.add_argument("--rollout", metavar="ROLLOUT", help="the trajectory it belongs to")
    p.add_argument("--step", metavar="NUMBER", type=int, help="its place there")
    p.add_argument(
        "--once", action="store_true",
        help="it has effects outside of the sandbox: never run it again elsewhere",
    )  # fmt: skip
    p.add_argument("--user", metavar="NAME", help="account that it runs as")
    p.add_argument("--cwd", metavar="DIR", help="where it runs")
    p.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=60.0,
        help="it is killed after so many seconds (default: 60)",
    )  # fmt: skip
    p.add_argument("sandbox", metavar="SANDBOX", help=SANDBOX_HELP)
    p.add_argument("action", metavar="ACTION", help=ACTION_HELP)
    p.add_argument("program", nargs="*", help="program and arguments")
    p.set_defaults(runs_program=True)
    p = _command(
        inner, "resolve", "_trajectories:resolve", "find out what became of an unknown action"
    )
    p.add_argument("sandbox", metavar="SANDBOX", help=SANDBOX_HELP)
    p.add_argument("action", metavar="ACTION", help=ACTION_HELP)
    said = p.add_mutually_exclusive_group()
    said.add_argument("--happened", action="store_true", help="state that it was done")
    said.add_argument("--not-run", action="store_true", help="state that nothing of it happened")
    p.add_argument("--exit-code", metavar="CODE", type=int, help="of one that happened")
    p = _command(
        inner, "forward", "_trajectories:forward", "bring a sandbox to where another one was"
    )
    p.add_argument("sandbox", metavar="SANDBOX", help="id of the new one")
    p.add_argument("source", metavar="SOURCE", help="id of the other one, which may have ended")
    p.add_argument("--through", metavar="ACTION", help="the last action to take (default: all)")
    p.add_argument(
        "--holds", metavar="ACTION",
        help="the new one holds the effects up to this one (default: as its snapshot)",
    )  # fmt: skip
    p.add_argument(
        "--unknown", choices=("stop", "skip", "run"), default="stop",
        help="what to do with actions that may or may not have happened (default: stop)",
    )  # fmt: skip
    p = _command(
        inner, "outcomes", "_trajectories:outcomes", "outcomes of a job, by whose fault it was"
    )
    p.add_argument("task", metavar="TASK", help="the job's id")
