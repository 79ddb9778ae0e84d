# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of the native API. Their constraints and descriptions are also its documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Fault
from opendsec_server.contract.node import (
    Accelerator,
    Backend,
    BackendInfo,
    Firmware,
    NodeInfo,
    OnTimeout,
    StateMode,
)
from opendsec_server.contract.states import EndReason, State

Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS_MAX)]
TimeoutS = Annotated[
    int,
    Meta(
        ge=1,
        le=limits.TIMEOUT_S_MAX,
        description="Seconds from now after which the sandbox ends.",
        examples=[300],
    ),
]
Cpu = Annotated[
    float,
    Meta(
        ge=limits.CPU_MIN,
        le=limits.CPU_MAX,
        description="CPUs, as a share of time. Default: the template's.",
        examples=[2],
    ),
]
MemoryMb = Annotated[
    int,
    Meta(
        ge=limits.MEMORY_MB_MIN,
        le=limits.MEMORY_MB_MAX,
        description="Memory limit in MiB. Default: the template's.",
        examples=[1024],
    ),
]
DiskMb = Annotated[
    int,
    Meta(
        ge=limits.DISK_MB_MIN,
        le=limits.DISK_MB_MAX,
        description="Limit of what the sandbox may write, in MiB. Default: the template's.",
        examples=[10240],
    ),
]
StringMap = dict[str, str]
Metadata = Annotated[
    StringMap,
    Meta(
        max_length=limits.METADATA_KEYS_MAX,
        description="The caller's own notes; lists can be filtered by them.",
        examples=[{"run": "42"}],
    ),
]
Labels = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=limits.METADATA_KEY_CHARS_MAX)]],
    Meta(max_length=limits.LABELS_MAX, examples=[["nightly"]]),
]
Saved = Annotated[
    StateMode,
    Meta(
        description="`full`: disk and memory, processes go on. `filesystem`: the disk only. What a "
        "backend can save is in its capabilities (`GET /v1/info`)."
    ),
]
Rules = Annotated[
    list[Annotated[str, Meta(max_length=64)]],
    Meta(max_length=limits.NETWORK_RULES_MAX, examples=[["203.0.113.0/24"]]),
]
Time = Annotated[str, Meta(description="RFC 3339, UTC, microseconds.")]


class Network(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a sandbox may reach, and who may reach it."""

    internet: Annotated[
        bool, Meta(description="False closes everything that `allow` does not open, DNS too.")
    ] = True
    allow: Annotated[
        Rules, Meta(description="IPv4 addresses or CIDRs that are open. Beats `deny`.")
    ] = []
    deny: Annotated[Rules, Meta(description="IPv4 addresses or CIDRs that are closed.")] = []
    allow_public_traffic: Annotated[
        bool, Meta(description="False: user ports need the sandbox's `traffic_token`.")
    ] = True
    mask_request_host: Annotated[
        str | None,
        Meta(
            description="Host header sent to user ports; `${PORT}` stands for the port.",
            examples=["localhost:${PORT}"],
        ),
    ] = None
    https_ports: Annotated[
        list[Annotated[int, Meta(ge=1, le=65_535)]],
        Meta(
            max_length=limits.HTTPS_PORTS_MAX,
            description="User ports that are spoken to over TLS.",
            examples=[[8443]],
        ),
    ] = []


class VmDisk(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One more disk of a full virtual machine: `/dev/disk/by-id/virtio-data1` and so on."""

    size_mb: Annotated[
        Annotated[int, Meta(ge=1, le=limits.DISK_MB_MAX)] | None,
        Meta(description="Size in MiB. Default: the image's; without one it must be given."),
    ] = None
    image: Annotated[
        Name | None, Meta(description="A disk image to begin with. Default: empty, unformatted.")
    ] = None


class Vm(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What only full virtual machines have."""

    firmware: Annotated[
        Firmware | None,
        Meta(
            description="`bios`, `uefi`, or `direct`: the kernel imported with the image. Default: "
            "as the image was imported."
        ),
    ] = None
    disks: Annotated[list[VmDisk], Meta(max_length=limits.VM_DISKS_MAX)] = []
    user_data: Annotated[
        Annotated[str, Meta(max_length=limits.USER_DATA_BYTES_MAX)] | None,
        Meta(
            description="For the guest's cloud-init, in any format it takes.",
            examples=["#cloud-config\npackages: [nginx]\n"],
        ),
    ] = None
    devices: Annotated[
        list[Annotated[str, Meta(max_length=12)]],
        Meta(
            max_length=limits.VM_DEVICES_MAX,
            description="PCI addresses of the node's devices to pass through (VFIO). The node's "
            "`passthrough_devices` must list them, and IOMMU groups are given whole. The memory of "
            "such a machine cannot be saved.",
            examples=[["0000:65:00.0"]],
        ),
    ] = []


ImageReference = Annotated[str, Meta(min_length=1, max_length=limits.IMAGE_REFERENCE_CHARS_MAX)]


class Ready(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When a program counts as up. One of the first three, or none: as soon as it runs."""

    command: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.BUILD_ARG_CHARS_MAX)] | None,
        Meta(description="Repeated by a shell of the image until it exits with 0."),
    ] = None
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65_535)] | None, Meta(description="Something listens there.")
    ] = None
    url: Annotated[
        str | None,
        Meta(
            description="Answers with a status below 400, inside the sandbox.",
            examples=["http://localhost:8000/health"],
        ),
    ] = None
    timeout_s: Annotated[float, Meta(gt=0, le=3_600)] = 300.0


class CreateSandbox(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A sandbox to make. Every field has a default."""

    template: Annotated[
        Name,
        Meta(
            description="Name or id of a template or snapshot. A snapshot fixes backend and disk "
            "size, and with memory in it cpu and memory too.",
            examples=["base"],
        ),
    ] = "base"
    image: Annotated[
        ImageReference | None,
        Meta(
            description="Instead of a template: reference of an image (`python:3.12-slim`, "
            "`host:5000/name:tag`, `name@sha256:…`), digest of one that is here, or name of a "
            "packed one. It is pulled unless it is here; a moved tag is seen after "
            "`POST /v1/images/pull`. Its ENV, WORKDIR and USER apply.",
            examples=["python:3.12-slim"],
        ),
    ] = None
    layers: Annotated[
        Annotated[list[ImageReference], Meta(max_length=limits.CREATE_LAYERS_MAX)],
        Meta(
            description="Images, by reference or digest, or templates, put on top of the image or "
            "template in this order: where files meet, the last wins."
        ),
    ] = []
    start_image: Annotated[
        bool, Meta(description="Start the image's own program (ENTRYPOINT and CMD) as well.")
    ] = False
    ready: Annotated[
        Ready | None, Meta(description="With `start_image`: when its program counts as up.")
    ] = None
    node_labels: Annotated[
        StringMap,
        Meta(
            max_length=limits.NODE_LABELS_MAX,
            description="Labels that its node must have (`opendsec node label`).",
            examples=[{"zone": "a"}],
        ),
    ] = {}
    cpu: Cpu | None = None
    memory_mb: MemoryMb | None = None
    disk_mb: DiskMb | None = None
    env: Annotated[
        StringMap,
        Meta(
            max_length=limits.ENV_KEYS_MAX,
            description="Environment of every process started through the API. At most "
            f"{limits.ENV_BYTES_MAX} bytes in all.",
            examples=[{"LANG": "C.UTF-8"}],
        ),
    ] = {}
    metadata: Metadata = {}
    labels: Labels = []
    task_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.TASK_ID_CHARS_MAX)] | None,
        Meta(description="The caller's job.", examples=["train-7"]),
    ] = None
    timeout_s: TimeoutS = limits.TIMEOUT_S_DEFAULT
    idle_timeout_s: Annotated[
        Annotated[int, Meta(ge=limits.IDLE_TIMEOUT_S_MIN, le=limits.TIMEOUT_S_MAX)] | None,
        Meta(description="Seconds without a request after which the sandbox ends."),
    ] = None
    on_timeout: Annotated[OnTimeout, Meta(description="What happens at the end of its time.")] = (
        "kill"
    )
    pause_mode: Annotated[
        StateMode,
        Meta(
            description="What a pause by time-out keeps. `filesystem` cannot be combined with "
            "`auto_resume`."
        ),
    ] = "full"
    auto_resume: Annotated[
        bool,
        Meta(
            description="Requests to its ports, files and processes resume it while it is paused, "
            f"for `timeout_s` and at least {limits.AUTO_RESUME_TIMEOUT_S_MIN} s. The request's "
            "token is checked first."
        ),
    ] = False
    backend: Annotated[
        Backend | None,
        Meta(
            description="Default: the snapshot's, else the server's (`default_backend` of "
            "`GET /v1/info`)."
        ),
    ] = None
    network: Network = Network()
    vm: Annotated[
        Vm | None, Meta(description="Only with templates that are disk images (backend `vm`).")
    ] = None


class SetTimeout(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A new end of life, sooner or later than before."""

    timeout_s: TimeoutS


class Connect(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How long the sandbox must live at least."""

    timeout_s: TimeoutS = limits.TIMEOUT_S_DEFAULT


class Pause(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a pause keeps."""

    mode: Annotated[
        StateMode,
        Meta(
            description="`full`: everything; its processes go on when it is resumed. "
            "`filesystem`: the disk; it boots again when it is resumed."
        ),
    ] = "full"


class Resume(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a paused sandbox runs on."""

    timeout_s: Annotated[
        TimeoutS | None, Meta(description="Default: what it was created with.")
    ] = None
    reboot: Annotated[bool, Meta(description="Forget the kept memory and start from the disk.")] = (
        False
    )


class Fork(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sandboxes to make from a sandbox as it is now."""

    count: Annotated[int, Meta(ge=1, le=limits.FORK_COUNT_MAX, examples=[2])] = 1
    timeout_s: Annotated[
        TimeoutS | None, Meta(description="Default: what the source was created with.")
    ] = None
    mode: Saved = "full"
    metadata: Annotated[Metadata | None, Meta(description="Default: the source's.")] = None
    labels: Annotated[Labels | None, Meta(description="Default: the source's.")] = None


class CreateSnapshot(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A snapshot to take."""

    name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.SNAPSHOT_NAME_CHARS_MAX)] | None,
        Meta(
            description="`name` or `name:tag`; the tag is `default` otherwise. An older snapshot "
            "of that name loses it, and keeps its id.",
            examples=["trained:v2"],
        ),
    ] = None
    mode: Saved = "full"


class Pack(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a sandbox's changes become an image."""

    name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS_MAX)] | None,
        Meta(
            description="`name` or `name:tag` in the project, to create from by `image`. An older "
            "image of that name loses it, and keeps its digest.",
            examples=["workspace:v2"],
        ),
    ] = None
    squash: Annotated[bool, Meta(description="One layer of everything, instead of one on top.")] = (
        False
    )
    scrub: Annotated[
        bool,
        Meta(
            description="Leave out shell histories, the host's name and addresses, and other "
            "things that belong to the one sandbox."
        ),
    ] = True


class ImageConfig(Struct, kw_only=True, frozen=True):
    """What an image says of how to run it."""

    entrypoint: list[str]
    cmd: list[str]
    env: StringMap
    workdir: str | None
    user: Annotated[str | None, Meta(description="Null: root.")]
    exposed_ports: list[str]
    stop_signal: Annotated[str | None, Meta(description="Told; it is not used.")]
    labels: StringMap


class Image(Struct, kw_only=True, frozen=True):
    """An image on the node."""

    digest: Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
    names: Annotated[list[str], Meta(description="What means it now.")]
    layers: Annotated[list[str], Meta(description="Digests (hex), the lowest first.")]
    size_bytes: Annotated[
        int, Meta(description="Of its layers on disk; other images may share them.")
    ]
    config: ImageConfig
    source: Annotated[
        str | None,
        Meta(description="Digest of the OCI manifest that it was pulled as. Null: made here."),
    ]
    created_at: Time
    last_used_at: Time
    on_demand_bytes: Annotated[
        int,
        Meta(description="Length of those of its layers whose data is fetched as it is read."),
    ]
    fetched_bytes: Annotated[int, Meta(description="What of them is here.")]


class CreateKey(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An API key to make."""

    name: Annotated[Name, Meta(examples=["ci"])]


class Usage(Struct, kw_only=True, frozen=True):
    """What a sandbox has used since it was created, over pauses and restarts."""

    cpu_seconds: Annotated[
        float, Meta(description="Processor time; of a virtual machine, its VMM's.")
    ]
    memory_mb_seconds: Annotated[
        float, Meta(description="MiB held, without file cache, times seconds.")
    ]
    disk_bytes: Annotated[
        int, Meta(description="On its disk, as the file system last accounted it.")
    ]
    egress_bytes: Annotated[
        int, Meta(description="Sent on its network link; answers to the API are among them.")
    ]
    ingress_bytes: int
    at: Time


class Sandbox(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One sandbox. Fields that a call does not show are absent."""

    sandbox_id: Annotated[str, Meta(pattern="^i[a-z0-9]{19}$", examples=["in0deabcdefghij12345"])]
    project_id: str
    template_id: str
    template: str
    backend: Backend
    state: State
    cpu: float
    memory_mb: int
    disk_mb: int
    metadata: StringMap
    labels: list[str]
    task_id: str | None
    created_at: Time
    started_at: Time | None
    end_at: Annotated[
        Time | None,
        Meta(description="When its life ends unless extended. Null while it is paused."),
    ]
    ended_at: Time | None
    end_reason: EndReason | None
    message: Annotated[str | None, Meta(description="One sentence of evidence for the end.")]
    fault: Annotated[
        Fault | None,
        Meta(description="Whose fault the end is; null when it was asked for."),
    ]
    timeout_s: Annotated[float, Meta(description="What it was created with.")]
    idle_timeout_s: int | None
    on_timeout: OnTimeout
    pause_mode: Annotated[StateMode, Meta(description="What a pause by time-out keeps.")]
    auto_resume: bool
    paused_mode: Annotated[StateMode | None, Meta(description="While it is paused: what was kept.")]
    accelerator: Annotated[
        Accelerator,
        Meta(
            description="How a virtual machine's instructions run: `kvm` on the processor, `tcg` "
            "emulated and slow."
        ),
    ]
    vmm: Annotated[str | None, Meta(description="The program behind a virtual machine.")]
    snapshot_id: Annotated[str | None, Meta(description="Started from this snapshot.")]
    network: Network
    domain: Annotated[
        str, Meta(description="User port P is served at `<P>-<sandbox_id>.<domain>`.")
    ]
    envd_version: Annotated[str, Meta(description="Version of the data plane's protocol.")]
    node_id: str
    image: Annotated[
        str | None, Meta(description="Digest or name of the image that it stands on.")
    ] = None
    env: Annotated[StringMap | None, Meta(description="Not in lists.")] = None
    usage: Annotated[
        Usage | None,
        Meta(description="What it has used until now, or did until its end. Not in lists."),
    ] = None
    access_token: Annotated[
        str | None,
        Meta(description="Opens the data plane (`X-Access-Token`). Not in lists."),
    ] = None
    traffic_token: Annotated[
        str | None,
        Meta(description="Opens user ports that are not public. Not in lists."),
    ] = None


class Console(Struct, kw_only=True, frozen=True):
    """What a serial console printed."""

    text: Annotated[
        str, Meta(description="The end of it since the machine last started, at most 64 KiB.")
    ]


class PauseReport(Struct, kw_only=True, frozen=True):
    """What a pause did."""

    took_s: float
    memory_before_bytes: int
    memory_freed_bytes: int
    stored_bytes: Annotated[int, Meta(description="Written to disk for it.")]


class PausedSandbox(Sandbox, kw_only=True, frozen=True, omit_defaults=True):
    """A sandbox that was just paused."""

    pause: PauseReport


class ForkItem(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Either the sandbox, or why it was not made."""

    sandbox: Sandbox | None = None
    error: Error | None = None


class Forked(Struct, kw_only=True, frozen=True):
    """One item per sandbox asked for."""

    items: list[ForkItem]


class Snapshot(Struct, kw_only=True, frozen=True):
    """A saved disk, or disk and memory, that sandboxes can start from."""

    id: Annotated[str, Meta(pattern="^s[a-z0-9]{19}$", examples=["s0123456789abcdefghi"])]
    project_id: str
    name: Annotated[str | None, Meta(description="`name:tag`.", examples=["trained:v2"])]
    names: Annotated[list[str], Meta(description="All that it can be named by, beside its id.")]
    source_id: Annotated[
        str, Meta(description="The sandbox it was taken of; it need not exist any more.")
    ]
    backend: Backend
    mode: StateMode
    template_id: Annotated[str, Meta(description="Of the source.")]
    template: str
    cpu: float
    memory_mb: int
    disk_mb: int
    created_at: Time
    disk_bytes: Annotated[int, Meta(description="That only this snapshot's disk holds.")]
    memory_bytes: Annotated[int, Meta(description="Of its memory, on disk.")]
    versions: Annotated[
        StringMap, Meta(description="What its memory needs to be restored. Empty without memory.")
    ]


class SnapshotList(Struct, kw_only=True, frozen=True):
    """One page of snapshots, newest first."""

    snapshots: list[Snapshot]
    next_cursor: Annotated[
        str | None, Meta(description="Send as `cursor` for the next page; null at the end.")
    ]


class SandboxList(Struct, kw_only=True, frozen=True):
    """One page of sandboxes, newest first."""

    sandboxes: list[Sandbox]
    next_cursor: Annotated[
        str | None, Meta(description="Send as `cursor` for the next page; null at the end.")
    ]


class MetricSample(Struct, kw_only=True, frozen=True):
    """One reading, taken from outside the sandbox."""

    at: Time
    cpu_count: float
    cpu_used_pct: float
    memory_used_bytes: int
    memory_total_bytes: int
    memory_cache_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int


class MetricSamples(Struct, kw_only=True, frozen=True):
    """Readings, oldest first."""

    samples: list[MetricSample]


class Transition(Struct, kw_only=True, frozen=True, rename={"source": "from", "target": "to"}):
    """One change of state."""

    source: State
    target: State
    at: Time
    reason: EndReason | None
    message: str | None
    cause: Annotated[
        str, Meta(description="Who caused or saw it: `create`, `api`, `node`, `reconcile`.")
    ]


class Transitions(Struct, kw_only=True, frozen=True):
    """The last 100 changes, oldest first."""

    transitions: list[Transition]


class Info(Struct, kw_only=True, frozen=True):
    """The server and its node."""

    version: str
    node: NodeInfo
    domain: str
    envd_version: str
    features: Annotated[dict[str, bool], Meta(description="What this server offers.")]
    backends: Annotated[list[BackendInfo], Meta(description="What sandboxes can run on.")]
    default_backend: Annotated[Backend, Meta(description="What a create gets that names none.")]


class Project(Struct, kw_only=True, frozen=True):
    """The caller's project."""

    project_id: str
    name: str
    sandboxes_max: Annotated[
        int,
        Meta(
            description="Sandboxes that may be alive at once. Paused ones do not count; "
            "resuming one takes a place again."
        ),
    ]
    created_at: Time


class ApiKey(Struct, kw_only=True, frozen=True):
    """A key, without its secret."""

    key_id: str
    name: str
    hint: Annotated[str, Meta(description="First and last characters.", examples=["e2b_4f…09ab"])]
    created_at: Time
    principal_id: Annotated[
        str | None, Meta(description="Whose it is. `null`: the project's own.")
    ] = None


class ApiKeyList(Struct, kw_only=True, frozen=True):
    """The project's keys, oldest first."""

    api_keys: list[ApiKey]


class NewApiKey(ApiKey, kw_only=True, frozen=True):
    """A key just made. The secret is shown only here."""

    key: Annotated[str, Meta(examples=["e2b_0123456789abcdef0123456789abcdef01234567"])]


class Error(Struct, kw_only=True, frozen=True):
    """What went wrong, whose fault it is, and what to do."""

    code: str
    message: str
    remediation: str
    retryable: Annotated[bool, Meta(description="Whether the same request may work later.")]
    fault: Literal["user", "platform", "capacity"]
    details: dict[str, Any]
    request_id: str | None


class ErrorBody(Struct, kw_only=True, frozen=True):
    """Body of every answer with a status of 400 and above."""

    error: Error
