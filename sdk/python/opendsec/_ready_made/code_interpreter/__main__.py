# SPDX-License-Identifier: Apache-2.0
"""``python3 -m code_interpreter``: serve until killed."""

from __future__ import annotations

import uvicorn

from .app import build_app

PORT = 49_999
"""Where E2B's clients look for it."""

uvicorn.run(
    build_app(),
    host="0.0.0.0",
    port=PORT,
    log_level="warning",
    timeout_keep_alive=640,
)
