# SPDX-License-Identifier: AGPL-3.0-only
"""Life and end."""

from __future__ import annotations

import threading
import uuid

import pytest

from opendsec import (
    IdempotencyMismatch,
    InvalidRequest,
    NotSupported,
    OpendsecError,
    SandboxNotFound,
    TemplateNotFound,
)

from .kit import Bench, Maker, at_once, state_is, until


def test_it_says_what_it_is(bench: Bench, make: Maker) -> None:
    info = make().info()
    assert (info.state, info.backend) == ("running", bench.backend)
    assert info.accelerator == bench.info.accelerator
    assert info.vmm == bench.info.vmm
    assert info.access_token and info.end_at is not None


def test_the_same_key_gives_the_same_sandbox(bench: Bench, make: Maker) -> None:
    key = uuid.uuid4().hex
    made = at_once([lambda: make(idempotency_key=key) for _ in range(4)])
    assert len({getattr(one, "sandbox_id", one) for one in made}) == 1, made
    with pytest.raises(IdempotencyMismatch):
        make(idempotency_key=key, metadata={"other": "1"})


def test_bad_wishes_are_typed(bench: Bench) -> None:
    for wanted, error in (
        ({"template": "no-such-template"}, TemplateNotFound),
        ({"memory_mb": -1}, InvalidRequest),
        ({"cpu": 1e9}, InvalidRequest),
        ({"timeout_s": 10**12}, InvalidRequest),
        ({"auto_resume": True, "pause_mode": "filesystem"}, InvalidRequest),
        ({"backend": "fncall"}, NotSupported),
    ):
        with pytest.raises(error) as caught:
            bench.create(**wanted)
        assert isinstance(caught.value, OpendsecError)
        assert caught.value.fault == "user" and caught.value.remediation, wanted


def test_killing_is_final_and_can_be_repeated(make: Maker) -> None:
    one = make()
    process = one.spawn("sleep 300")
    assert one.kill() is True
    one.kill()
    info = one.info()
    assert (info.state, info.end_reason, info.fault) == ("ended", "killed", None)
    with pytest.raises(SandboxNotFound):
        process.wait()
    for call in (lambda: one.exec("true"), one.pause, one.resume, one.fork, one.snapshot):
        with pytest.raises(SandboxNotFound):
            call()


def test_it_can_be_killed_while_it_starts(bench: Bench, make: Maker) -> None:
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.extend(at_once([make])))
    thread.start()

    def seen() -> list[str]:
        states = ["pending", "starting", "running"]
        found = bench.client.list(labels=[make.label], states=states)
        return [info.sandbox_id for info in found]

    (sandbox_id,) = until(seen, "it never shows")
    bench.client.kill(sandbox_id)
    thread.join(200)
    assert len(made) == 1, "the create must end"
    assert bench.client.info(sandbox_id).ended


def test_it_can_be_killed_while_paused(make: Maker) -> None:
    for mode in ("full", "filesystem"):
        one = make()
        one.pause(mode)
        assert one.kill() is True
        assert one.info().end_reason == "killed"


def test_its_time_runs_out(make: Maker) -> None:
    one = make()
    one.set_timeout(1)
    until(state_is(one, "ended"), "it lives on")
    assert one.info().end_reason == "timeout"


def test_it_ends_when_idle_and_not_when_busy(make: Maker) -> None:
    busy, idle = make(idle_timeout_s=6), make(idle_timeout_s=6)
    until(
        lambda: busy.exec("sleep 0.2").ok and idle.info().state == "ended", "the idle one lives on"
    )
    assert idle.info().end_reason == "idle"
    assert busy.info().state == "running"


def test_its_time_runs_out_and_it_is_paused(make: Maker) -> None:
    for mode in ("full", "filesystem"):
        one = make(on_timeout="pause", pause_mode=mode)
        one.files.write("kept.txt", mode)
        one.set_timeout(1)
        until(state_is(one, "paused"), "it is not paused")
        info = one.info()
        assert info.end_at is None and info.end_reason is None
        one.resume()
        assert one.files.read_text("kept.txt") == mode


def test_connecting_never_shortens_its_life(bench: Bench, make: Maker) -> None:
    one = make()
    end_at = one.info().end_at
    assert end_at is not None
    bench.client.connect(one.sandbox_id, timeout_s=5)
    assert one.info().end_at == end_at
    bench.client.connect(one.sandbox_id, timeout_s=3000)
    longer = one.info().end_at
    assert longer is not None and longer > end_at
    one.resume(timeout_s=5)
    assert one.info().end_at == longer


def test_lists_find_it_by_what_it_was_given(bench: Bench, make: Maker) -> None:
    one = make(metadata={"cf": "yes"}, task_id=make.label)
    assert [i.sandbox_id for i in bench.client.list(task_id=make.label)] == [one.sandbox_id]
    assert [i.sandbox_id for i in bench.client.list(labels=[make.label])] == [one.sandbox_id]
    one.pause("filesystem")
    paused = bench.client.list(labels=[make.label], states=["paused"])
    assert [info.sandbox_id for info in paused] == [one.sandbox_id]
    assert not list(bench.client.list(labels=[make.label], states=["running"]))


def test_its_history_is_kept(make: Maker) -> None:
    one = make()
    one.pause("filesystem")
    one.resume()
    one.kill()
    states = [transition.to for transition in one.transitions()]
    wanted = ["starting", "running", "pausing", "paused", "resuming", "running", "ended"]
    assert [state for state in states if state in wanted][-len(wanted) :] == wanted, states
