# SPDX-License-Identifier: AGPL-3.0-only
"""Actions: done once, whatever happens to the sandbox meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from opendsec import OpendsecError

from .kit import Maker, until


def test_an_action_is_done_once_over_a_pause(make: Maker) -> None:
    one = make()
    command = "echo x >> n; echo begun; sleep 3; echo out; exit 3"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(one.actions.exec, "slow", command)
        until(lambda: one.exec("cat n").stdout == "x\n", "it does not run")
        one.pause("full")
        assert one.actions.get("slow").state == "running"
        one.resume()
        assert asked.result().exit_code == 3
    ended = one.actions.exec("slow", command)
    assert (ended.exit_code, ended.stdout, ended.attempt) == (3, "begun\nout\n", 1)
    assert one.exec("cat n").stdout == "x\n"


def test_how_an_action_ended_whose_memory_is_gone_is_not_known(make: Maker) -> None:
    one = make()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(one.actions.exec, "lost", "echo x >> n; sync; sleep 600", timeout_s=900)
        until(lambda: one.exec("cat n").stdout == "x\n", "it does not run")
        one.pause("filesystem")
        one.resume()
        failure = asked.exception()
    assert isinstance(failure, OpendsecError)
    assert (failure.code, failure.fault) == ("action_unknown", "platform")
    assert one.exec("cat n").stdout == "x\n"
