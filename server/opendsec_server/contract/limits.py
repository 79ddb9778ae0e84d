# SPDX-License-Identifier: AGPL-3.0-only
"""Every limit that a caller can meet, in one place."""

from __future__ import annotations

CPU_MIN = 0.1
CPU_MAX = 64.0
CPU_DEFAULT = 2.0

MEMORY_MB_MIN = 64
MEMORY_MB_MAX = 262_144
MEMORY_MB_DEFAULT = 1_024

DISK_MB_MIN = 64
DISK_MB_MAX = 1_048_576
DISK_MB_DEFAULT = 10_240

VM_DISKS_MAX = 8
"""Disks of a full virtual machine beside the first one."""
VM_DEVICES_MAX = 16
USER_DATA_BYTES_MAX = 64 * 1_024

PIDS_MAX_DEFAULT = 4_096

TIMEOUT_S_MAX = 7 * 24 * 3_600
TIMEOUT_S_DEFAULT = 300
E2B_V1_TIMEOUT_S_DEFAULT = 15

IDLE_TIMEOUT_S_MIN = 1

METADATA_KEYS_MAX = 64
METADATA_KEY_CHARS_MAX = 256
METADATA_VALUE_CHARS_MAX = 4_096
ENV_KEYS_MAX = 512
ENV_BYTES_MAX = 128 * 1_024
LABELS_MAX = 64
NODE_LABELS_MAX = 64
NODE_LABEL_CHARS_MAX = 128
TASK_ID_CHARS_MAX = 256
NETWORK_RULES_MAX = 256
IDEMPOTENCY_KEY_CHARS_MAX = 255
IDEMPOTENCY_KEPT_S = 24 * 3_600

FORK_COUNT_MAX = 100
AUTO_RESUME_TIMEOUT_S_MIN = 300
"""An automatic resume lets a sandbox live at least this long."""
SNAPSHOT_NAME_CHARS_MAX = 128

GROUP_SERVICES_MAX = 64
GROUP_ALIASES_MAX = 16
"""Further names of one service."""
GROUP_TIMEOUT_S_DEFAULT = 3_600
GROUP_START_TIMEOUT_S_DEFAULT = 600
GROUP_START_TIMEOUT_S_MAX = 6 * 3_600
"""How long a group may take until all its services are up. Well within ``IDEMPOTENCY_KEPT_S``."""

UNPACK_SOURCES_CHARS_MAX = 8 * 1_024
"""Of the sources of one call that copies from an archive: they travel in its head."""
API_BODY_BYTES_MAX = 4 * 1_024 * 1_024
LIST_LIMIT_MAX = 100

GROUP_MEMBERS_MAX = 100
"""Sandboxes of one group. Each is told of all others."""
GROUP_NAMES_MAX = 16
"""Name and aliases of one member."""

BATCH_ITEMS_MAX = 32_768
BATCH_BODY_BYTES_MAX = 32 * 1_024 * 1_024
BATCH_WAIT_S_DEFAULT = 3_600
BATCH_WAIT_S_MAX = 24 * 3_600
"""How long an item of a batch may wait for its turn. Its time to start begins with the turn."""

BULK_COMMAND_CHARS_MAX = 128 * 1_024
BULK_EXEC_TIMEOUT_S_MAX = 24 * 3_600
BULK_OUTPUT_BYTES_DEFAULT = 64 * 1_024
BULK_OUTPUT_BYTES_MAX = 1_024 * 1_024
BULK_CONCURRENCY_DEFAULT = 64
BULK_CONCURRENCY_MAX = 1_024

START_BUDGET_S = 30.0
"""From admission to the guest agent's first answer. After it: StartTimeout."""

METRICS_INTERVAL_S = 5.0
METRICS_KEPT_S = 3_600.0

PROJECT_SANDBOXES_MAX_DEFAULT = 100_000
"""Sandboxes of one project that may be alive and not paused, unless the project says otherwise."""

ENDED_RECORDS_KEPT_S = 30 * 24 * 3_600
"""How long the record of an ended sandbox can be listed and read."""

METRICS_BULK_IDS_MAX = 100
LOG_ENTRIES_MAX = 1_000
NAME_CHARS_MAX = 256
"""Names of API keys and references to templates."""
HTTPS_PORTS_MAX = 128
E2B_REFRESH_S_MAX = 3_600
E2B_REFRESH_S_DEFAULT = 15
E2B_TIMEOUT_S_DEFAULT = 300

IMAGE_REFERENCE_CHARS_MAX = 512
CREATE_LAYERS_MAX = 64
"""Images put on top of each other in one create."""

TEMPLATE_NAME_CHARS_MAX = 128
TEMPLATE_TAGS_MAX = 32
"""Tags in one request."""
BUILD_STEPS_MAX = 512
BUILD_STAGES_MAX = 64
BUILD_ARG_CHARS_MAX = 65_536
BUILD_LOG_BYTES_MAX = 8 * 1_024 * 1_024
"""Of one build; what comes after is not kept, and the log says so."""
BUILD_LOG_ENTRIES_MAX = 50_000
BUILD_LOG_LINE_CHARS_MAX = 8_192
E2B_BUILD_CPU_MAX = 32
E2B_BUILD_MEMORY_MB_MIN = 128
