# SPDX-License-Identifier: AGPL-3.0-only
"""The node protocol over HTTP: what node and control plane must agree on.

Every method of ``NodeClient`` and ``NodeImages`` is one POST with its arguments as a JSON object;
the answer is a line with ``{"ok": …}`` or ``{"error": …}``. While it takes long, blank lines come
before it: they tell the caller that the node lives. Streams are such answers, one on a line.

Both sides hold one secret, and prove it in every request and in every line of an answer: see
``node_proof``. Whoever can read the network still sees the tokens of sandboxes: between machines
it takes TLS, or a network of its own.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

import msgspec

from .errors import Fault, InvalidRequest, NodeUnavailable, OpendsecError, all_error_classes
from .images import ExecEvent, NodeImages
from .node import NodeClient, NodeEvent, SandboxSpec, SandboxStatus

PREFIX = "/node/v1"
ALIVE_EVERY_S = 5.0
"""How often an answer that takes long shows that the node lives."""
SILENCE_S_MAX = 15.0
"""After it the caller takes the node for gone."""
CREATES = "creates"
"""Several creates in one request; each is answered when it is done."""
CREATES_MAX = 256
UNPACK = "unpack"
INFO = "info"
"""The one call that may be sent to whichever node listens there: it tells the node's id."""
EVENTS = "events"
EXEC = "exec"
BODY_BYTES_MAX = 64 * 1_024 * 1_024

AUTH_HEADER = "x-opendsec-node-auth"
PROOF_HEADER = "x-opendsec-node-proof"
ARGUMENTS_HEADER = "x-opendsec-arguments"
SECRET_CHARS_MIN = 32
CLOCK_SKEW_S_MAX = 30.0
"""By how much a request's time may differ from the node's. The node remembers for twice as long
which requests it has seen."""

_BY_HAND = {"images", "create", "exec", "events", "unpack", "console"}
"""Not plain calls: streams, files, many at once; a console is a socket of the node's machine."""

encode = msgspec.json.Encoder().encode


class WireError(msgspec.Struct, kw_only=True, frozen=True):
    """An ``OpendsecError`` on its way."""

    kind: str
    """Name of its class, or of the nearest one of the contract."""
    message: str
    remediation: str
    details: dict[str, Any] = {}
    fault: Fault | None = None
    retryable: bool | None = None
    """Of the node's own refinement of an error, which may be another's fault than its kind.
    None: as its kind."""
    retry_after_s: int | None = None


class Call(msgspec.Struct, kw_only=True, frozen=True):
    """One method: how its arguments and answers are written."""

    name: str
    arguments: type[msgspec.Struct]
    decode_arguments: Any
    decode_answer: Any

    def arguments_of(self, body: bytes) -> dict[str, Any]:
        """The keyword arguments in a request.

        Raises:
            InvalidRequest: they are none.
        """
        try:
            given = self.decode_arguments(body)
        except msgspec.DecodeError as exc:
            raise InvalidRequest(f"{self.name}: {exc}") from exc
        return {name: getattr(given, name) for name in given.__struct_fields__}


def _answer_type(result: Any) -> Any:
    return msgspec.defstruct(
        "Answer",
        [
            ("ok", result | None if result is not None else None, None),
            ("error", WireError | None, None),
        ],
        kw_only=True,
    )


def _call(name: str, method: Any) -> Call:
    hints = typing.get_type_hints(method)
    fields: list[Any] = []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name == "self":
            continue
        hint = hints[parameter.name]
        if parameter.default is inspect.Parameter.empty:
            fields.append((parameter.name, hint))
        else:
            fields.append((parameter.name, hint, parameter.default))
    arguments = msgspec.defstruct(name.replace(".", "_"), fields, kw_only=True)
    return Call(
        name=name,
        arguments=arguments,
        decode_arguments=msgspec.json.Decoder(arguments).decode,
        decode_answer=msgspec.json.Decoder(_answer_type(hints["return"])).decode,
    )


def _calls() -> dict[str, Call]:
    found = {}
    for prefix, protocol in (("", NodeClient), ("images.", NodeImages)):
        for name, method in vars(protocol).items():
            if name.startswith("_") or name in _BY_HAND or not inspect.isfunction(method):
                continue
            found[prefix + name] = _call(prefix + name, method)
    return found


CALLS = _calls()
"""Plain calls by name; those of the image store as ``images.<name>``."""
EXEC_CALL = _call(EXEC, NodeClient.exec)
UNPACK_CALL = _call(UNPACK, NodeClient.unpack)


class CreateLine(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What became of one of several creates."""

    n: int = -1
    """Its place in the request. -1: of the request as a whole."""
    ok: SandboxStatus | None = None
    error: WireError | None = None


class ExecLine(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One event of a program. The stream's last line has an ``end`` or an ``error``."""

    ok: ExecEvent | None = None
    error: WireError | None = None


class EventLine(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One change of a sandbox's state."""

    ok: NodeEvent | None = None
    error: WireError | None = None


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of a call that failed."""

    error: WireError


decode_specs = msgspec.json.Decoder(list[SandboxSpec]).decode
decode_create_line = msgspec.json.Decoder(CreateLine).decode
decode_exec_line = msgspec.json.Decoder(ExecLine).decode
decode_event_line = msgspec.json.Decoder(EventLine).decode
decode_failure = msgspec.json.Decoder(Failure).decode

_CLASSES = {cls.__name__: cls for cls in all_error_classes()}


def to_wire(exc: OpendsecError) -> WireError:
    """An error for the other side."""
    kind = next(cls for cls in type(exc).__mro__ if _CLASSES.get(cls.__name__) is cls)
    return WireError(
        kind=kind.__name__,
        fault=exc.fault if exc.fault != kind.fault else None,
        retryable=exc.retryable if exc.retryable != kind.retryable else None,
        message=exc.message,
        remediation=exc.remediation,
        details=exc.details,
        retry_after_s=exc.retry_after_s,
    )


def from_wire(error: WireError) -> OpendsecError:
    """The error that the other side meant. One that this release does not know is the node's."""
    exc = _CLASSES.get(error.kind, NodeUnavailable)(
        error.message,
        remediation=error.remediation,
        details=error.details,
        retry_after_s=error.retry_after_s,
    )
    if error.fault is not None:
        exc.fault = error.fault
    if error.retryable is not None:
        exc.retryable = error.retryable
    return exc


# --- refusals ---------------------------------------------------------------


class Refusal(msgspec.Struct, kw_only=True, frozen=True):
    """Why a node does not hear a request. It comes as the answer's status alone, and without a
    proof: who reads it must not build on that nothing has happened."""

    status: int
    message: str
    remediation: str


STRANGER = Refusal(
    status=401,
    message="the request does not prove that its sender holds this node's secret",
    remediation="Give gateway and node the same secret (node_secret_file, or secret_file of the "
    "node), and the same release.",
)
ALTERED = Refusal(
    status=400,
    message="the request's body is not the one that its sender proved",
    remediation="Something between gateway and node changes what they say; use https.",
)
REPEATED = Refusal(
    status=409,
    message="the node has seen this request before, or started after it was made",
    remediation="If it lasts, set the clocks of gateway and node; else something repeats what "
    "they say: use https.",
)
MISDIRECTED = Refusal(
    status=421,
    message="the request is meant for another node",
    remediation="Another node than before listens at this address: look at the list of nodes.",
)
REFUSALS = {r.status: r for r in (STRANGER, ALTERED, REPEATED, MISDIRECTED)}
