# SPDX-License-Identifier: Apache-2.0
"""Every number of the client's behaviour, in one place."""

from __future__ import annotations

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 75.0
"""No byte for so long on an ordinary call: the connection counts as lost. Above the 60 s that the
edge lets a request wait for its sandbox's resume, so that its typed answer arrives first."""

CREATE_TIMEOUT_S = 600.0
"""Above the server's own start budget, so that the server's typed answer arrives first. An emulated
machine that boots a distribution has the longest."""

STATE_TIMEOUT_S = 300.0
"""Pause, resume, fork and snapshot: memory of many gigabytes may have to go to or from disk."""

PACK_TIMEOUT_S = 1_800.0
"""All that a sandbox wrote is read, compressed and written."""

PULL_TIMEOUT_S = 4_000.0
"""Above the hour that the server gives a pull or push."""

PULL_LOOK_INTERVAL_S = 0.5
"""How often the command line asks how far a pull is."""

HEALTH_TIMEOUT_S = 5.0
PROBE_PAUSES_S = (0.25, 0.5, 1.0)
"""After a broken stream the sandbox's health is asked for again after these pauses: a restarted
edge needs a moment, and "it lives" is worth more to the caller than "unknown"."""

KEEPALIVE_INTERVAL_S = 15
"""Silent streams carry a sign of life this often."""

STREAM_SILENCE_MAX_S = 75.0
"""A stream without even a sign of life for so long counts as lost."""

DEADLINE_GRACE_S = 10.0
"""How long after a command's deadline the client waits for the server to end it."""

RECONNECT_S = 120.0
RECONNECT_PAUSE_S = 0.5
"""Results that a broken connection cut off are gone on with, until the server was away for so long
in one piece."""

STREAM_LASTED_S = 10.0
"""A stream that lasted for so long shows that the server was there."""

KEEPALIVE_CONNECTIONS_MAX = 100
KEEPALIVE_EXPIRY_S = 30.0

RETRIES_MAX_DEFAULT = 6
RETRY_BASE_S = 0.2
RETRY_MAX_S = 10.0
RETRY_AFTER_MAX_S = 60.0
"""A server that asks for a longer pause gets this one."""

OUTPUT_BYTES_MAX_DEFAULT = 16 * 1024 * 1024
"""Of each of stdout and stderr, the first so many bytes are kept in a result."""

FRAME_BYTES_MAX = 64 * 1024 * 1024
ERROR_BODY_BYTES_MAX = 64 * 1024

STDIN_CHUNK_BYTES = 128 * 1024
STDIN_END_S = 0.2
"""After a command's end, its input's source gets so long to notice before it is left alone."""

FILE_CHUNK_BYTES = 256 * 1024

FORKS_MAX = 100
"""Children of one fork."""

LIST_PAGE_MAX = 100

POLL_MIN_S = 0.05
POLL_MAX_S = 1.0

AGENT_PORT = 49983

ACTION_WAIT_S = 50
"""How long one request waits for an action's end; it is asked again then."""
ACTION_TIMEOUT_S_DEFAULT = 60.0
ACTION_OUTPUT_BYTES_DEFAULT = 64 * 1024
