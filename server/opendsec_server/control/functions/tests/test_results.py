# SPDX-License-Identifier: AGPL-3.0-only
"""What came of a call, from bytes that its own code may have made up."""

from __future__ import annotations

import signal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec_server.contract import errors
from opendsec_server.control.functions.model import Limits, Outcome
from opendsec_server.control.functions.results import Report, outcome_of

LIMITS = Limits(timeout_s=1.0, memory_mb=64)


class Line(msgspec.Struct):
    index: int
    value: msgspec.Raw


def judged(text: bytes, **report: object) -> Outcome:
    values = {"done": "exited", "status": 0, "result": len(text), **report}
    return outcome_of(msgspec.convert(values, Report), text, LIMITS, "iworker")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_result_or_an_error_of_the_call(text: bytes) -> None:
    found = judged(text)
    assert found.error is None or found.error.fault == "user"
    # It stands in an answer of many lines: none may break off the others.
    line = msgspec.json.encode({"value": found.value, "index": 5}) + b"\n"
    assert line.count(b"\n") == 1 and msgspec.json.decode(line, type=Line).index == 5


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"", errors.FunctionCrashed),
        (b"[]", errors.FunctionResultInvalid),
        (b'{"value": 1}{"value": 2}', errors.FunctionResultInvalid),
        (b"[" * 100_000, errors.FunctionResultInvalid),
        (b'{"value": ' + b"[" * 900 + b"]" * 900 + b"}", errors.FunctionResultInvalid),
        (b'{"value": "\xff"}', errors.FunctionResultInvalid),
        (b'{"value": tru}', errors.FunctionResultInvalid),
        (b'{"value": [1,\n{"index": 7, "value": 2}\n]}', errors.FunctionResultInvalid),
        (b'{"value": [1,\r2]}', errors.FunctionResultInvalid),
        (b'{"files": {"../x": ""}}', errors.FunctionResultInvalid),
        (b'{"files": {"/x": ""}}', errors.FunctionResultInvalid),
        (b'{"files": {"x": "%%"}}', errors.FunctionResultInvalid),
        (b'{"raised": {"type": "E"}}', errors.FunctionRaised),
        (b'{"raised": {}, "memory": true}', errors.FunctionOutOfMemory),
        (b'{"raised": {}, "disk": true}', errors.FunctionDiskFull),
        (b'{"unencodable": "x"}', errors.FunctionResultInvalid),
        (b'{"too_large": true}', errors.FunctionResultTooLarge),
    ],
)
def test_claims_of_the_code(text: bytes, kind: type[errors.OpendsecError]) -> None:
    assert type(judged(text).error) is kind


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        ({"done": "timeout", "status": 9}, errors.FunctionTimeout),
        ({"done": "cancelled", "status": 9}, errors.FunctionCancelled),
        ({"done": "result_too_large", "status": 9}, errors.FunctionResultTooLarge),
        ({"status": 9}, errors.FunctionCrashed),
        ({"status": 9, "oom": True}, errors.FunctionOutOfMemory),
        ({"status": 3 << 8}, errors.FunctionCrashed),
        ({"status": 70 << 8}, errors.FunctionOutOfMemory),
    ],
)
def test_the_front_is_believed_before_the_code(
    report: dict[str, object], kind: type[errors.OpendsecError]
) -> None:
    found = judged(b'{"value": "forged"}', **report)
    assert type(found.error) is kind and found.value is None


def test_the_evidence_names_the_signal() -> None:
    error = judged(b"", status=int(signal.SIGSEGV)).error
    assert error is not None and error.details["signal"] == "SIGSEGV"
    assert error.details["exit_code"] is None


def test_streams_are_cut_where_the_front_says() -> None:
    text = b'{"value": 1}'
    report = Report(done="exited", status=0, result=len(text), stdout=3, stderr=2)
    found = outcome_of(report, text + b"abcde", LIMITS, "iworker")
    assert found.value is not None and bytes(found.value) == b"1"
    assert (found.stdout, found.stderr) == ("abc", "de")
