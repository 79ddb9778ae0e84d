# SPDX-License-Identifier: AGPL-3.0-only
"""What an action asks for, in one canonical form, and the limits of it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.actions import KEPT_OUTPUT_BYTES_MAX
from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.node import StateMode
from opendsec_server.control.params import digest
from opendsec_server.store.trajectories import ActionKind, Limits

ACTION_ID_CHARS_MAX = 128
ACTION_ID_RE = re.compile(rf"[A-Za-z0-9._:-]{{1,{ACTION_ID_CHARS_MAX}}}")
STEP_MAX = 1_000_000_000
TRAJECTORY = Limits(actions=10_000, bytes=64 * 1_024 * 1_024)
"""What the log of one sandbox may hold."""
ARGV_MAX = 4_096
COMMAND_BYTES_MAX = 128 * 1_024
"""Of program, arguments and environment together; Linux takes no longer argument either."""
PATH_CHARS_MAX = 4_096
FILE_BYTES_MAX = 1_024 * 1_024
"""Of a file that is written or read by an action. Larger ones go through the files API."""
OUTPUT_BYTES_MAX = KEPT_OUTPUT_BYTES_MAX
OUTPUT_BYTES_DEFAULT = 64 * 1_024
EXEC_TIMEOUT_S_DEFAULT = 60.0
EXEC_TIMEOUT_S_MAX = 24 * 3_600.0
WAIT_S_DEFAULT = 50.0
WAIT_S_MAX = 60.0
"""How long one request waits for an action's end; below what proxies allow."""
USER_CHARS_MAX = 256


class ActionParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One action, as asked for."""

    action_id: str
    kind: ActionKind
    rollout_id: str | None = None
    step: int | None = None
    once: bool = False
    """It has effects outside of the sandbox: a fast-forward takes its result, and does not run
    it again."""
    argv: tuple[str, ...] = ()
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    timeout_s: float = EXEC_TIMEOUT_S_DEFAULT
    output_bytes: int = OUTPUT_BYTES_DEFAULT
    path: str | None = None
    content: str | None = None
    """Base64."""
    mode: StateMode = "filesystem"
    name: str | None = None

    def sha256(self) -> str:
        """Digest of what it does. Where it stands in a rollout is no part of it."""
        return digest(msgspec.structs.replace(self, rollout_id=None, step=None), "action")

    def data(self) -> bytes:
        """The content, decoded."""
        return base64.b64decode(self.content or "")


_decode = msgspec.json.Decoder(ActionParams).decode


def pack_params(params: ActionParams) -> str:
    """As the store keeps them."""
    return msgspec.json.encode(params).decode()


def unpack_params(text: str) -> ActionParams:
    """What ``pack_params`` made this text of."""
    return _decode(text)


def check_action(params: ActionParams) -> None:
    """Check an action as it came from a caller.

    Raises:
        InvalidRequest: the message names the field.
    """
    check_action_id(params.action_id)
    if params.rollout_id is not None and not (
        0 < len(params.rollout_id) <= limits.TASK_ID_CHARS_MAX
    ):
        raise InvalidRequest(f"rollout_id: 1 to {limits.TASK_ID_CHARS_MAX} characters")
    if params.step is not None and not 0 <= params.step <= STEP_MAX:
        raise InvalidRequest(f"step: 0 to {STEP_MAX}")
    if params.user is not None and not 0 < len(params.user) <= USER_CHARS_MAX:
        raise InvalidRequest(f"user: 1 to {USER_CHARS_MAX} characters")
    if not 0 <= params.output_bytes <= OUTPUT_BYTES_MAX:
        raise InvalidRequest(f"output_bytes: 0 to {OUTPUT_BYTES_MAX}")
    if params.kind == "exec":
        _check_exec(params)
    elif params.kind != "snapshot":
        _check_path(params)
    if params.kind == "write_file":
        _check_content(params)


def check_action_id(action_id: str) -> None:
    """Check an id as it came from a caller.

    Raises:
        InvalidRequest: it is none.
    """
    if ACTION_ID_RE.fullmatch(action_id) is None:
        raise InvalidRequest(f"action_id: must match {ACTION_ID_RE.pattern}")


def _check_exec(params: ActionParams) -> None:
    if not params.argv or not params.argv[0]:
        raise InvalidRequest("argv: a program is missing")
    if len(params.argv) > ARGV_MAX:
        raise InvalidRequest(f"argv: more than {ARGV_MAX} arguments")
    if not 0 < params.timeout_s <= EXEC_TIMEOUT_S_MAX:
        raise InvalidRequest(f"timeout_s: more than 0, at most {EXEC_TIMEOUT_S_MAX:.0f}")
    texts = [*params.argv, *params.env, *params.env.values()]
    if any("\0" in text for text in texts) or any("=" in name or not name for name in params.env):
        raise InvalidRequest("argv, env: a NUL character, or a name that is empty or holds `=`")
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise InvalidRequest("argv and env must be Unicode text") from None
    if size > COMMAND_BYTES_MAX:
        raise InvalidRequest(
            f"argv, env: {size} bytes, at most {COMMAND_BYTES_MAX} are taken",
            remediation="Write long input to a file, and name the file.",
        )


def _check_path(params: ActionParams) -> None:
    path = params.path or ""
    if not 0 < len(path) <= PATH_CHARS_MAX or "\0" in path:
        raise InvalidRequest(f"path: 1 to {PATH_CHARS_MAX} characters, none of them NUL")


def _check_content(params: ActionParams) -> None:
    if params.content is None:
        raise InvalidRequest("content: missing")
    try:
        size = len(base64.b64decode(params.content, validate=True))
    except (binascii.Error, ValueError):
        raise InvalidRequest("content: must be base64") from None
    if size > FILE_BYTES_MAX:
        raise InvalidRequest(
            f"content: {size} bytes, at most {FILE_BYTES_MAX} are taken",
            remediation="Upload it through the files API.",
        )


def content_sha256(data: bytes) -> str:
    """How a file's content is named where it is not shown."""
    return hashlib.sha256(data).hexdigest()
