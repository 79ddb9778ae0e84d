# SPDX-License-Identifier: AGPL-3.0-only
"""Automatic resume."""

from __future__ import annotations

import urllib.request

import pytest

from opendsec import NetworkPolicy, Sandbox, SandboxPaused

from .kit import Bench, Maker, each, serve, status_of_url

RESUMED_FOR_S_MIN = 300


def served(make: Maker, **wanted: object) -> Sandbox:
    """One with a web server, paused with its memory."""
    one = make(auto_resume=True, **wanted)
    serve(one, 8126)
    one.pause("full")
    return one


def test_a_command_resumes_it(make: Maker) -> None:
    one = make(auto_resume=True, timeout_s=60)
    one.pause("full")
    assert one.exec("echo woken").stdout == "woken\n"
    info = one.info()
    assert info.state == "running" and info.end_at is not None
    resumed = [t.at for t in one.transitions() if t.to == "resuming"][-1]
    assert (info.end_at - resumed).total_seconds() >= RESUMED_FOR_S_MIN - 1


def test_a_file_resumes_it(make: Maker) -> None:
    one = make(auto_resume=True)
    one.files.write("kept.txt", "kept")
    one.pause("full")
    assert one.files.read_text("kept.txt") == "kept"
    assert one.info().state == "running"


def test_a_wrong_token_does_not_resume_it(bench: Bench, make: Maker) -> None:
    one = make(auto_resume=True)
    one.pause("full")
    with one.http(49983) as agent:
        for headers in ({}, {"X-Access-Token": "0" * 64}):
            assert agent.get("/envs", headers=headers).status_code == 401
    assert one.info().state == "paused"
    assert one.is_running() is False
    assert one.info().state == "paused", "asking for health wakes nobody"


def test_a_user_port_resumes_it(make: Maker) -> None:
    one = served(make)
    with one.http(8126) as web:
        assert web.get("/index.html").text == "from inside"
    assert one.info().state == "running"


def test_a_private_port_resumes_it_only_with_its_token(make: Maker) -> None:
    one = served(make, network=NetworkPolicy(allow_public_traffic=False))
    with one.http(8126) as web:
        wrong = {"E2b-Traffic-Access-Token": "0" * 64}
        assert web.get("/index.html", headers=wrong).status_code == 403
        assert one.info().state == "paused"
        assert web.get("/index.html").text == "from inside"


def test_a_signed_url_resumes_it(make: Maker) -> None:
    one = make(auto_resume=True)
    one.files.write("signed.txt", "by url")
    url = one.files.download_url("signed.txt", expires_in_s=600)
    one.pause("full")
    assert status_of_url(url.replace("signature=v1_", "signature=v1_x")) in (401, 502)
    assert one.info().state == "paused"
    with urllib.request.urlopen(url, timeout=90) as answer:
        assert answer.read() == b"by url"
    assert one.info().state == "running"


def test_requests_at_once_join_one_resume(make: Maker) -> None:
    one = make(auto_resume=True)
    one.pause("full")
    answers = each(lambda n: one.exec(f"echo {n}").stdout, range(6))
    assert answers == [f"{n}\n" for n in range(6)]
    assert [t.to for t in one.transitions()].count("resuming") == 1


def test_after_a_filesystem_pause_nothing_resumes_it(make: Maker) -> None:
    one = make(auto_resume=True)
    one.pause("filesystem")
    with pytest.raises(SandboxPaused):
        one.exec("true")
    assert one.info().state == "paused"


def test_without_being_asked_for_nothing_resumes_it(make: Maker) -> None:
    one = make()
    one.files.write("x.txt", "x")
    one.pause("full")
    with pytest.raises(SandboxPaused):
        one.files.read("x.txt")
    with one.http(8126) as web:
        answer = web.get("/")
    assert answer.status_code == 502 and "not found" in answer.json()["message"]
    assert status_of_url(one.files.download_url("x.txt")) in (401, 502)
    assert one.info().state == "paused"
