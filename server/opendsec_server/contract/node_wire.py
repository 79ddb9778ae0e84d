# SPDX-License-Identifier: AGPL-3.0-only
"""The node protocol over HTTP: what node and control plane must agree on.

Every method of ``NodeClient`` and ``NodeImages`` is one POST with its arguments as a JSON object;
the answer is ``{"ok": …}`` or ``{"error": …}``. While it takes long, blank lines come before it:
they tell the caller that the node lives. Streams are such answers, one on a line.

Both sides hold one secret. A request proves it for its own method, path and a nonce; the answer
proves it for the same nonce. The secret itself is never sent. Whoever can read the network still
sees the tokens of sandboxes: between machines it takes TLS, or a network of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import typing
from typing import Any

import msgspec

from .errors import InvalidRequest, NodeUnavailable, OpendsecError, all_error_classes
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
EVENTS = "events"
EXEC = "exec"
BODY_BYTES_MAX = 64 * 1_024 * 1_024

AUTH_HEADER = "x-opendsec-node-auth"
PROOF_HEADER = "x-opendsec-node-proof"
ARGUMENTS_HEADER = "x-opendsec-arguments"
NONCE_CHARS = 32
SECRET_CHARS_MIN = 32

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
    kind = next(cls.__name__ for cls in type(exc).__mro__ if _CLASSES.get(cls.__name__) is cls)
    return WireError(
        kind=kind,
        message=exc.message,
        remediation=exc.remediation,
        details=exc.details,
        retry_after_s=exc.retry_after_s,
    )


def from_wire(error: WireError) -> OpendsecError:
    """The error that the other side meant. One that this release does not know is the node's."""
    return _CLASSES.get(error.kind, NodeUnavailable)(
        error.message,
        remediation=error.remediation,
        details=error.details,
        retry_after_s=error.retry_after_s,
    )


# --- proofs -----------------------------------------------------------------


def request_proof(secret: bytes, nonce: str, method: str, target: str) -> str:
    """What a request shows of the secret."""
    text = f"to-node\n{nonce}\n{method}\n{target}"
    # Not ``hmac.digest``: it lets go of the interpreter's lock, and waits for the store's threads
    # to get it back.
    return f"{nonce}.{hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()}"


def answer_proof(secret: bytes, nonce: str) -> str:
    """What an answer shows of it."""
    return hmac.new(secret, f"from-node\n{nonce}".encode(), hashlib.sha256).hexdigest()


def proven_nonce(secret: bytes, header: str, method: str, target: str) -> str | None:
    """The nonce of a request whose sender holds the secret. None: it does not."""
    nonce, _, _ = header.partition(".")
    if len(nonce) != NONCE_CHARS or not (nonce.isascii() and nonce.isalnum()):
        return None
    wanted = request_proof(secret, nonce, method, target)
    return nonce if hmac.compare_digest(wanted.encode(), header.encode()) else None
