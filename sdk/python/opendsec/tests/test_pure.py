# SPDX-License-Identifier: Apache-2.0
"""Decisions without I/O: settings, retries, frames, signatures, bounded output."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec import _errors as e
from opendsec import _limits, _settings
from opendsec._answers import from_connect, from_http
from opendsec._output import BoundedBuffer, TextDecoder
from opendsec._ports import is_listening
from opendsec._retry import Patience, Repeat, RetryPolicy, Unsent
from opendsec._signing import file_signature
from opendsec._wire import EndEvent, FrameDecoder, encode_frame, exit_code_of

from .fake_server import error

# --- settings --------------------------------------------------------------------


def test_settings_prefer_arguments_then_own_then_e2b_names() -> None:
    env = {
        "OPENDSEC_API_URL": "http://own:1/",
        "OPENDSEC_API_KEY": "own",
        "E2B_API_URL": "http://e2b:2",
        "E2B_API_KEY": "e2b",
        "E2B_SANDBOX_URL": "http://boxes:3",
    }
    assert _settings.resolve("https://arg", "key", environ=env).base_url == "https://arg"
    own = _settings.resolve(environ=env)
    assert (own.base_url, own.sandbox_url, own.api_key) == ("http://own:1", "http://own:1", "own")
    for name in ("OPENDSEC_API_URL", "OPENDSEC_API_KEY"):
        del env[name]
    e2b = _settings.resolve(environ=env)
    assert (e2b.base_url, e2b.sandbox_url, e2b.api_key) == ("http://e2b:2", "http://boxes:3", "e2b")


def test_local_key_is_read_but_never_sent_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("e2b_local\n")
    env = {"OPENDSEC_STATE_DIR": str(tmp_path)}
    local = _settings.resolve(environ=env)
    assert local.base_url == _settings.DEFAULT_URL
    assert local.api_key == "e2b_local"
    assert "e2b_local" not in repr(local)
    assert _settings.resolve("https://example.test", environ=env).api_key is None


@pytest.mark.parametrize("url", ["localhost:7300", "ftp://host", "http://", "x"])
def test_bad_address_is_named(url: str) -> None:
    with pytest.raises(e.NotConfigured, match="not an address"):
        _settings.resolve(url)


# --- retries ---------------------------------------------------------------------


def pause(error: e.OpendsecError, repeat: Repeat = Repeat.IDEMPOTENT, tries: int = 1) -> Any:
    return RetryPolicy(3, uniform=lambda low, high: high).pause_s(error, tries, repeat)


def test_what_is_repeated() -> None:
    assert pause(e.ConnectionFailed("x")) is not None
    assert pause(e.NodeFull("x", http_status=503)) is not None
    assert pause(e.QuotaExceeded("x", http_status=429)) is not None
    assert pause(e.SandboxStartFailed("x", http_status=500)) is not None
    assert pause(e.IdempotencyInProgress("x", http_status=409)) is not None
    assert pause(e.Internal("x", http_status=500)) is None
    assert pause(e.SandboxNotFound("x", http_status=502)) is None
    assert pause(e.InvalidRequest("x", http_status=400)) is None


def test_commands_are_repeated_only_if_the_server_cannot_have_seen_them() -> None:
    assert pause(e.ConnectionFailed("x"), Repeat.IF_UNSENT) is None
    assert pause(e.NodeUnavailable("x", http_status=503), Repeat.IF_UNSENT) is None
    assert pause(Unsent("x"), Repeat.IF_UNSENT) is not None
    not_forwarded = from_http(
        503,
        {"retry-after": "1"},
        b'{"code":503,"message":"m","error_code":"control_plane_unavailable"}',
    )
    assert isinstance(not_forwarded, e.NodeUnavailable)
    assert pause(not_forwarded, Repeat.IF_UNSENT) >= 1


def test_pauses_grow_are_bounded_and_honour_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_limits, "RETRY_BASE_S", 1.0)
    policy = RetryPolicy(20, uniform=lambda low, high: high)
    lost = e.ConnectionFailed("x")
    pauses = [policy.pause_s(lost, tries, Repeat.IDEMPOTENT) for tries in range(1, 8)]
    assert pauses == [1, 2, 4, 8, 10, 10, 10]
    assert policy.pause_s(lost, 21, Repeat.IDEMPOTENT) is None
    full = e.NodeFull("x", http_status=503, retry_after_s=7)
    assert policy.pause_s(full, 1, Repeat.IDEMPOTENT) == 8
    far = e.NodeFull("x", http_status=503, retry_after_s=9999)
    assert policy.pause_s(far, 1, Repeat.IDEMPOTENT) == _limits.RETRY_AFTER_MAX_S + 1


# --- errors ----------------------------------------------------------------------


def test_native_error_becomes_its_class() -> None:
    body = json.dumps(error("node_full", retryable=True, fault="capacity", details={"cpu": 1}))
    got = from_http(503, {"x-request-id": "r", "retry-after": "3"}, body.encode())
    assert type(got) is e.NodeFull
    assert (got.message, got.remediation) == ("message of node_full", "remediation of node_full")
    assert (got.request_id, got.retry_after_s, got.http_status) == ("req-1", 3.0, 503)
    assert (got.retryable, got.fault, got.details) == (True, "capacity", {"cpu": 1})


def test_code_of_a_later_server_keeps_its_words() -> None:
    body = json.dumps(error("out_of_gpus", retryable=True, fault="capacity"))
    got = from_http(429, {}, body.encode())
    assert type(got) is e.QuotaExceeded
    assert (got.code, got.fault, got.retryable) == ("out_of_gpus", "capacity", True)


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (502, b'{"sandboxId":"i1","message":"The sandbox was not found","code":502}', "Sandbox"),
        (
            502,
            b'{"message":"The sandbox is running but port is not open","port":80,"code":502}',
            "Port",
        ),
        (507, b'{"code":507,"message":"no space"}', "Disk"),
        (404, b'{"code":"not_found","message":"no"}', "NotFound"),
        (409, b'{"code":"already_exists","message":"is there"}', "Already"),
        (401, b'{"code":401,"message":"no token"}', "Unauth"),
        (500, b"<html>oops</html>", "Internal"),
        (302, b"", "BadResponse"),
        (503, b"\xff\xfe", "NodeUnavailable"),
    ],
)
def test_other_error_shapes(status: int, body: bytes, cls: str) -> None:
    got = from_http(status, {}, body)
    assert type(got).__name__.startswith(cls)
    assert got.message


def test_connect_codes() -> None:
    assert type(from_connect("unavailable", "The sandbox was not found")) is e.SandboxNotFound
    assert type(from_connect("deadline_exceeded", "")) is e.WaitTimeout
    assert type(from_connect("new_code", "m")) is e.Internal


def test_every_class_has_words_and_a_known_fault() -> None:
    for cls in e.all_error_classes():
        assert cls.code
        assert cls.default_remediation
        assert cls.fault in e.FAULTS
        assert (cls.__doc__ or "").strip()


def test_codes_are_those_of_the_server() -> None:
    server = pytest.importorskip(
        "opendsec_server.contract.errors", reason="the server package is not installed"
    )
    for theirs in server.all_error_classes():
        ours = getattr(e, theirs.__name__, None)
        assert ours is not None, f"{theirs.__name__} is missing in the SDK"
        assert (ours.code, ours.fault, ours.retryable) == (
            theirs.code,
            theirs.fault,
            theirs.retryable,
        ), theirs.__name__


# --- frames ----------------------------------------------------------------------


@given(st.lists(st.dictionaries(st.text(), st.text())), st.integers(1, 50))
def test_frames_survive_any_cut(messages: list[dict[str, str]], step: int) -> None:
    data = b"".join(encode_frame(message) for message in messages)
    decoder = FrameDecoder()
    got = []
    for start in range(0, len(data), step):
        got += [json.loads(payload) for _, payload in decoder.feed(data[start : start + step])]
    assert got == messages


@given(st.binary(max_size=200))
def test_garbage_never_breaks_the_decoder_untyped(data: bytes) -> None:
    with contextlib.suppress(e.BadResponse):
        list(FrameDecoder().feed(data))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (EndEvent(exit_code=0, exited=True, status="exit status 0"), (0, None)),
        (EndEvent(exit_code=3, exited=True, status="exit status 3"), (3, None)),
        (EndEvent(exit_code=-1, status="signal: killed"), (137, 9)),
        (EndEvent(exit_code=-1, status="signal: segmentation fault (core dumped)"), (139, 11)),
        (EndEvent(exit_code=-1, status="signal: signal 34"), (162, 34)),
    ],
)
def test_exit_codes(event: EndEvent, expected: tuple[int, int | None]) -> None:
    assert exit_code_of(event) == expected


def test_exit_code_is_never_made_up() -> None:
    with pytest.raises(e.BadResponse):
        exit_code_of(EndEvent(exit_code=0, exited=False, status="", error="vanished"))


# --- the rest --------------------------------------------------------------------


def test_signature_of_e2b_version_1() -> None:
    got = file_signature("/home/user/a", "read", None, "envdtok", None)
    assert got == "v1_8RXODqNeADarD9vmCEFJbwl7o5g1JnXdtHUz5upb32w"
    assert got != file_signature("/home/user/a", "read", "user", "envdtok", None)
    assert got != file_signature("/home/user/a", "read", None, "envdtok", 1)


@given(st.lists(st.binary(max_size=20)), st.integers(0, 60))
def test_buffer_keeps_the_first_bytes(pieces: list[bytes], limit: int) -> None:
    buffer = BoundedBuffer(limit)
    for piece in pieces:
        buffer.write(piece)
    whole = b"".join(pieces)
    assert buffer.getvalue() == whole[:limit]
    assert buffer.truncated == (len(whole) > limit)


@given(st.text(), st.integers(1, 4))
def test_text_decoder_mends_split_characters(text: str, step: int) -> None:
    data = text.encode()
    decoder = TextDecoder()
    got = "".join(decoder.feed(data[i : i + step]) for i in range(0, len(data), step))
    assert got + decoder.finish() == text


def test_listeners_are_found_in_the_kernels_table() -> None:
    table = (
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n"
        "   1: 0100007F:1F91 0100007F:1F90 01 00000000:00000000\n"
    )
    assert is_listening(table, 8080)
    assert not is_listening(table, 8081)  # A connection, not a listener.


def test_patience_counts_the_time_away_in_one_piece() -> None:
    now = 0.0
    patience = Patience(RetryPolicy(), clock=lambda: now)
    broken = e.ConnectionFailed("cut")
    patience.asking()
    assert not patience.spent(broken)
    now += _limits.RECONNECT_S
    patience.asking()
    assert not patience.spent(broken)
    now += 1
    patience.asking()
    assert patience.spent(broken)
    # It came back for a moment, with a line, or with nothing but time.
    patience.heard()
    assert not patience.spent(broken)
    patience.asking()
    now += _limits.RECONNECT_S + 1
    assert not patience.spent(broken)
    assert patience.spent(e.InvalidRequest("no"))
    assert Patience(RetryPolicy(retries_max=0)).spent(broken)
