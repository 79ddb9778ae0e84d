# SPDX-License-Identifier: AGPL-3.0-only
"""Everything at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from opendsec import OpendsecError

from .kit import Bench, Maker, at_once, state_is, until

SETTLED = ("running", "paused", "ended")
TYPED = {
    "already_paused",
    "sandbox_state_conflict",
    "sandbox_paused",
    "sandbox_not_found",
    "connection_failed",
    "agent_unresponsive",
    "process_not_found",
}
"""What a call that lost may be told."""


def assert_typed(answers: list[object]) -> None:
    for answer in answers:
        if isinstance(answer, OpendsecError):
            assert answer.code in TYPED, answers


def test_pause_kill_exec_and_timeout_have_one_winner(make: Maker) -> None:
    for _ in range(4):
        one = make()
        calls: list[Callable[[], object]] = [
            one.pause,
            one.kill,
            partial(one.exec, "echo x", timeout_s=60),
            partial(one.set_timeout, 1),
            one.pause,
        ]
        assert_typed(at_once(calls))
        until(state_is(one, "ended"), "a kill must win in the end")
        assert one.info().end_reason in ("killed", "timeout")


def test_pause_resume_exec_and_extension_lose_nothing(make: Maker) -> None:
    one = make()
    for number in range(4):
        one.files.write(f"of-{number}.txt", str(number))
        calls: list[Callable[[], object]] = [
            one.pause,
            one.resume,
            lambda: one.exec("echo x", timeout_s=60).stdout,
            lambda: one.set_timeout(1000),
        ]
        answers = at_once(calls)
        assert_typed(answers)
        until(lambda: one.info().state in ("running", "paused"), "it settles on nothing")
        one.resume()
        for older in range(number + 1):
            assert one.files.read_text(f"of-{older}.txt") == str(older), answers


def test_snapshots_forks_and_pauses_at_once_lose_nothing(bench: Bench, make: Maker) -> None:
    one = make()
    one.files.write("then.txt", "then")
    answers = at_once(
        [
            lambda: make.snapshot(one),
            lambda: make.fork(one, 2),
            lambda: one.exec("cat then.txt").stdout,
            one.pause,
        ]
    )
    assert_typed(answers)
    until(lambda: one.info().state in SETTLED, "it settles on nothing")
    one.resume()
    assert one.files.read_text("then.txt") == "then"
    for info in bench.client.list(labels=[make.label]):
        child = bench.client.connect(info.sandbox_id)
        assert child.files.read_text("then.txt") == "then"


def test_the_end_of_its_time_and_a_pause_at_once(make: Maker) -> None:
    one = make(on_timeout="pause")
    one.files.write("then.txt", "then")
    answers = at_once([lambda: one.set_timeout(1), one.pause, one.resume, one.pause])
    assert_typed(answers)
    until(lambda: one.info().state in ("running", "paused"), "it settles on nothing")
    one.resume(timeout_s=600)
    until(lambda: one.info().state in ("running", "paused"), "it settles on nothing")
    one.resume(timeout_s=600)
    assert one.files.read_text("then.txt") == "then"
