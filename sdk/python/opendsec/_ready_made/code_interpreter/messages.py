# SPDX-License-Identifier: Apache-2.0
"""Jupyter's messages as the lines that E2B's clients read.

https://jupyter-client.readthedocs.io/en/stable/messaging.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Line = dict[str, Any]
"""One JSON object of an answer; ``type`` says which."""

_FORMATS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown",
    "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf",
    "text/latex": "latex", "application/json": "json", "application/javascript": "javascript",
    "e2b/data": "data", "e2b/chart": "chart",
}  # fmt: skip


def line_of(message: Mapping[str, Any]) -> Line | None:
    """What a message of a kernel tells a client. None: nothing."""
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            return {
                "type": "stdout" if content["name"] == "stdout" else "stderr",
                "text": content["text"],
                "timestamp": _time(message["header"]["date"]),
            }
        case "display_data":
            return _result(content["data"], is_main_result=False)
        case "execute_result":
            return _result(content["data"], is_main_result=True)
        case "execute_input":
            return {
                "type": "number_of_executions",
                "execution_count": content["execution_count"],
            }
        case "error":
            return error(content["ename"], content["evalue"], content["traceback"])
    return None


def error(name: str, value: str, traceback: list[str]) -> Line:
    """The line that says what code raised."""
    return {"type": "error", "name": name, "value": value, "traceback": "\n".join(traceback)}


def _result(data: Mapping[str, Any], *, is_main_result: bool) -> Line:
    line: Line = {"type": "result", "is_main_result": is_main_result}
    extra = {}
    for kind, value in data.items():
        if kind in _FORMATS:
            line[_FORMATS[kind]] = value
        else:
            extra[kind] = value
    if extra:
        line["extra"] = extra
    text = line.get("text")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        # Clients expect a string's characters, not how Python would write it.
        line["text"] = text[1:-1]
    return line


def _time(date: Any) -> str:
    return date.isoformat() if hasattr(date, "isoformat") else str(date)
