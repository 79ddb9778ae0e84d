# SPDX-License-Identifier: AGPL-3.0-only
"""Limits and waiting times that are the node's own business, in one place."""

from __future__ import annotations

STARTS_AT_ONCE_PER_CORE = 2
"""Sandboxes being set up at one time, per core; more only makes each of them slower."""

STARTS_QUEUED_MAX = 8_192
"""Creates that may wait for their turn; above it the node says that it is full."""

RUNTIME_TIMEOUT_S = 20.0
"""The most an OCI runtime call may take; a hung runtime must not hang a kill for ever."""

AGENT_CONNECT_PAUSE_S = 0.002
"""Pause between attempts to reach a guest agent that is just starting."""

AGENT_CALL_TIMEOUT_S = 5.0
"""A call to a running guest agent."""

AGENT_TERMINATE_TIMEOUT_S = 0.15
"""How long a kill waits for the guest agent to end its streams properly."""

KILL_WAIT_S = 10.0
"""How long the processes of a killed sandbox may take to go before teardown goes on."""

AGENT_SYNC_TIMEOUT_S = 20.0
"""How long a virtual machine may take to write out its disk."""

GUEST_CONNECT_TIMEOUT_S = 0.1
"""One attempt to reach the agent of a booting machine, whose network drops what comes too early."""

GUEST_CONNECT_TIMEOUT_MAX_S = 2.0
"""What the attempts' time grows to: the network of a guest in an emulated host is that slow."""

START_BUDGET_EMULATED_S = 180.0
"""Instead of ``START_BUDGET_S`` where guests are emulated: many may boot at once."""

VM_START_BUDGET_FACTOR = 3
"""How much longer a full machine may take to start than a microVM: it boots a distribution."""

VMM_PIDS_MAX = 256
"""Threads of one VMM."""

MACHINE_LAYERS_MAX = 11
"""Layers of one virtual machine, each of which is a disk; of an image that has more, the lowest
are collapsed once. Firecracker has interrupts for 13 disks, two of which are the guest's own."""

MACHINE_TEMPLATES_MAX = 16
"""Templates' memory kept at one time; the one used longest ago goes first."""

TEMPLATE_RETRY_S = 60.0
"""When a template's memory could not be made: how long creates boot instead."""

FREEZE_WAIT_S = 5.0
"""How long the processes of a sandbox may take to stand still."""

RECLAIM_STEP_BYTES = 64 * 1024 * 1024
RECLAIM_STEP_BYTES_MIN = 1024 * 1024
RECLAIM_STEPS_MAX = 16_384
"""A pause takes memory back in steps, so that it can be given up between two of them. A step that
brings less than the minimum is the last. 1 TiB at most."""

SWAP_CALL_TIMEOUT_S = 30.0
SWAP_OFF_TIMEOUT_S = 600.0
"""Making and adding swap; and removing it, for which all of it is read back into memory."""

MEMORY_AVAILABLE_FLOOR_BYTES = 256 * 1024 * 1024
"""Below this, the node takes no new sandbox: the host itself would be in danger."""

DISK_FREE_FLOOR_BYTES = 512 * 1024 * 1024
"""The same for the disk pool and for the file system below it."""

CAPACITY_CHECK_INTERVAL_S = 0.5
"""Memory and disk are looked at no more often than this."""

ENDED_KEPT_MAX = 10_000
ENDED_KEPT_S = 24 * 3_600
"""How many ended sandboxes the journal keeps, and for how long."""

SLOTS_RESTING = 64
"""Slot numbers beyond those in use, so that a freed one can rest before it is used again."""

HOUSEKEEPING_INTERVAL_S = 60.0

USAGE_FRESH_MAX = 100
"""Sandboxes in one question, above which readings of the sampler are not made anew."""

USAGE_KEPT_EVERY_S = 15.0
"""How often meters of running sandboxes are written down."""

JOURNAL_RETRY_S = 1.0
"""Pause between attempts to record an end while the journal cannot be written."""

PAUSE_RETRY_S = 30.0
"""When a pause at the end time failed: how long until the next attempt."""

IDLE_RECHECK_FLOOR_S = 1.0
"""An idle check never comes again sooner than this."""

EVENTS_QUEUED_MAX = 65_536
"""Events a slow reader may lag behind before its stream ends."""

DEV_SHM_BYTES = 64 * 1024 * 1024
RUN_TMPFS_BYTES = 64 * 1024 * 1024
NOFILE_MAX = 1_048_576

EXEC_KEEPALIVE_S = 15
EXEC_SILENCE_MAX_S = 90.0
"""How often a guest agent shows that it is there while a program of ours prints nothing; and how
long it may show nothing, for example because its sandbox is being saved."""

UNPACK_SILENCE_MAX_S = 120.0
"""How long an unpacking guest agent may take nothing, or take for its answer."""

START_LOG_BYTES_MAX = 64 * 1024
"""What is kept of a start command's output."""

KEPT_START_TIMEOUT_S = 20.0
"""Start of a program whose outcome is kept; the agent gives its loading 10 s."""

FILE_CALL_TIMEOUT_S = 60.0
"""Reading or writing a file of an action; they are small."""

READY_PAUSE_FIRST_S = 0.05
READY_PAUSE_S = 0.5
"""Between attempts to see whether a start command is ready: short ones at first."""

READY_ANSWER_TIMEOUT_S = 5.0
"""For the answer to a readiness check by URL."""

READY_TIMEOUT_MAX_S = 3_600.0

PACK_TOOL_TIMEOUT_S = 1_800.0
"""For one program that copies or checks what a sandbox wrote."""

PACK_FILES_BYTES_MAX = 256 * 1024**3
"""Length of all files that become one layer, holes counted: a layer is made by reading them."""

PACK_ENTRIES_MAX = 4_000_000
"""Files of one layer."""
