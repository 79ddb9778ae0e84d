# SPDX-License-Identifier: AGPL-3.0-only
"""What a create asks for, in one canonical form for both APIs."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Sequence

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, NotSupported
from opendsec_server.contract.node import (
    Backend,
    NetworkPolicy,
    OnTimeout,
    StateMode,
    VmOptions,
)
from opendsec_server.store.records import SandboxExtra

AGENT_PORT = 49_983
HOST_MASK_CHARS_MAX = 255
_DOMAIN_RE = re.compile(r"(\*\.)?([a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?\.?)+")
_PCI_RE = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_USER_DATA_BEGINNINGS = (
    "#cloud-config", "#!", "#include", "#cloud-boothook", "#part-handler", "## template: jinja",
)  # fmt: skip
_MIME_MARK = "mime-version:"
_MIME_HEAD_CHARS = 4_096
_HOST_MASK_RE = re.compile(r"[A-Za-z0-9._:\[\]${}-]+")


def digest(value: msgspec.Struct, *what: str) -> str:
    """SHA-256 of the canonical form: equal for requests that mean the same.

    Args:
        value: The request's parameters.
        what: The operation and its object, so that keys of different ones never fit.
    """
    text = msgspec.json.encode((what, value) if what else value, order="deterministic")
    return hashlib.sha256(text).hexdigest()


class CreateParams(msgspec.Struct, kw_only=True, frozen=True):
    """Parameters of one create, after defaults. Sizes of None come from the template or snapshot.

    So does a backend of None, else it is the server's default.
    """

    template: str = "base"
    backend: Backend | None = None
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    labels: list[str] = []
    task_id: str | None = None
    timeout_s: int = limits.TIMEOUT_S_DEFAULT
    idle_timeout_s: int | None = None
    on_timeout: OnTimeout = "kill"
    pause_mode: StateMode = "full"
    """What a pause by time-out keeps."""
    auto_resume: bool = False
    network: NetworkPolicy = NetworkPolicy()
    extra: SandboxExtra = SandboxExtra()

    def sha256(self) -> str:
        """Digest of the canonical form: equal for requests that mean the same."""
        return digest(self)


def check_params(params: CreateParams) -> None:
    """Check what types and ranges cannot say.

    Raises:
        InvalidRequest: the message names the field.
        NotSupported: the network policy asks for too much.
    """
    if params.auto_resume and params.pause_mode == "filesystem":
        raise InvalidRequest(
            "auto_resume: a sandbox paused without its memory is not resumed by itself",
            remediation="Use pause_mode `full`, or leave auto_resume out.",
        )
    check_timeout(params.timeout_s)
    check_map("metadata", params.metadata)
    check_env(params.env)
    check_labels(params.labels)
    if params.task_id is not None:
        check_text("task_id", params.task_id, limits.TASK_ID_CHARS_MAX)
    check_text("template", params.template, limits.NAME_CHARS_MAX)
    check_sources(params.extra.image, params.extra.layers)
    check_network(params.network)
    if params.extra.vm is not None:
        check_vm(params.extra.vm)


def check_vm(options: VmOptions) -> None:
    """Check what is asked of a full virtual machine, as far as no node is needed for it.

    Raises:
        InvalidRequest: the message names the field.
    """
    if len(options.disks) > limits.VM_DISKS_MAX:
        raise InvalidRequest(f"vm.disks: at most {limits.VM_DISKS_MAX}")
    for disk in options.disks:
        if disk.image is not None:
            check_text("vm.disks.image", disk.image, limits.NAME_CHARS_MAX)
        if not (disk.image is not None and disk.size_mb == 0) and not (
            1 <= disk.size_mb <= limits.DISK_MB_MAX
        ):
            raise InvalidRequest(f"vm.disks.size_mb: 1 to {limits.DISK_MB_MAX}")
    if len(options.devices) > limits.VM_DEVICES_MAX:
        raise InvalidRequest(f"vm.devices: at most {limits.VM_DEVICES_MAX}")
    for address in options.devices:
        if _PCI_RE.fullmatch(address) is None:
            raise InvalidRequest(
                f"vm.devices: `{address[:32]}` is no PCI address such as `0000:65:00.0`"
            )
    data = options.user_data
    if data is None:
        return
    if len(data.encode(errors="replace")) > limits.USER_DATA_BYTES_MAX or "\0" in data:
        raise InvalidRequest(
            f"vm.user_data: more than {limits.USER_DATA_BYTES_MAX} bytes, or NUL in it"
        )
    is_mime = _MIME_MARK in data[:_MIME_HEAD_CHARS].lower()
    if not is_mime and not data.startswith(_USER_DATA_BEGINNINGS):
        raise InvalidRequest(
            "vm.user_data: cloud-init does not take this; it begins with none of "
            + ", ".join(f"`{text}`" for text in _USER_DATA_BEGINNINGS),
            remediation="Begin with `#cloud-config` and YAML, or with `#!` and a script.",
        )


def check_labels(labels: list[str]) -> None:
    """Check a caller's labels.

    Raises:
        InvalidRequest: too many, or one is empty, too long, or has NUL.
    """
    if len(labels) > limits.LABELS_MAX:
        raise InvalidRequest(f"labels: at most {limits.LABELS_MAX}")
    for label in labels:
        check_text("labels", label, limits.METADATA_KEY_CHARS_MAX)


def check_timeout(timeout_s: float) -> None:
    """Refuse end times further away than a sandbox may live.

    Raises:
        InvalidRequest: above ``TIMEOUT_S_MAX``.
    """
    if timeout_s > limits.TIMEOUT_S_MAX:
        raise InvalidRequest(
            f"timeout: {timeout_s} s is above the maximum of {limits.TIMEOUT_S_MAX} s",
            details={"max_s": limits.TIMEOUT_S_MAX},
        )


def check_text(field: str, value: str, chars_max: int) -> None:
    """Refuse what cannot be stored or is absurdly long.

    Raises:
        InvalidRequest: empty, longer than ``chars_max``, or with a NUL character.
    """
    if not value:
        raise InvalidRequest(f"{field}: must not be empty")
    if len(value) > chars_max:
        raise InvalidRequest(f"{field}: {len(value)} characters; at most {chars_max}")
    if "\0" in value:
        raise InvalidRequest(f"{field}: must not contain NUL")


def check_map(field: str, values: dict[str, str]) -> None:
    """Check a map of caller's strings.

    Raises:
        InvalidRequest: too many entries, or one too long or with NUL.
    """
    if len(values) > limits.METADATA_KEYS_MAX:
        raise InvalidRequest(f"{field}: at most {limits.METADATA_KEYS_MAX} entries")
    for key, value in values.items():
        check_text(f"{field} key", key, limits.METADATA_KEY_CHARS_MAX)
        if len(value) > limits.METADATA_VALUE_CHARS_MAX or "\0" in value:
            raise InvalidRequest(
                f"{field}: the value of `{key[:64]}` has NUL, or more than "
                f"{limits.METADATA_VALUE_CHARS_MAX} characters"
            )


def check_env(env: dict[str, str]) -> None:
    """Check variables of an environment.

    Raises:
        InvalidRequest: too many, too long in all, or one is not a variable.
    """
    if len(env) > limits.ENV_KEYS_MAX:
        raise InvalidRequest(f"env: at most {limits.ENV_KEYS_MAX} variables")
    size_bytes = 0
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise InvalidRequest(
                f"env: `{key[:64]}` is not a variable: names are not empty and have no `=`, "
                "and neither names nor values have NUL"
            )
        size_bytes += len(key.encode()) + len(value.encode()) + 2
    if size_bytes > limits.ENV_BYTES_MAX:
        raise InvalidRequest(f"env: {size_bytes} bytes in all; at most {limits.ENV_BYTES_MAX}")


def check_network(policy: NetworkPolicy) -> None:
    """Check a network policy.

    Raises:
        InvalidRequest: an entry is no IPv4 address or CIDR, a port is none, or too many.
        NotSupported: an entry is a domain name or IPv6.
    """
    if len(policy.allow) + len(policy.deny) > limits.NETWORK_RULES_MAX:
        raise InvalidRequest(f"network: at most {limits.NETWORK_RULES_MAX} rules")
    _check_addresses("network.allow", policy.allow)
    _check_addresses("network.deny", policy.deny)
    if len(policy.https_ports) > limits.HTTPS_PORTS_MAX:
        raise InvalidRequest(f"network.https_ports: at most {limits.HTTPS_PORTS_MAX}")
    for port in policy.https_ports:
        if not 1 <= port <= 65_535 or port == AGENT_PORT:
            raise InvalidRequest(
                f"network.https_ports: {port} is not allowed: ports are 1 to 65535, "
                f"and {AGENT_PORT} is the guest agent's"
            )
    mask = policy.mask_request_host
    if mask is not None and (
        len(mask) > HOST_MASK_CHARS_MAX or _HOST_MASK_RE.fullmatch(mask) is None
    ):
        raise InvalidRequest("network.mask_request_host: not a host; `${PORT}` stands for the port")


def _check_addresses(field: str, entries: Iterable[str]) -> None:
    for entry in entries:
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            # An address that is merely wrong also looks like a name; names end in a letter.
            if _DOMAIN_RE.fullmatch(entry[:255]) and entry.rstrip(".")[-1:].isalpha():
                raise NotSupported(
                    f"{field}: domain names such as `{entry[:64]}` are not supported yet",
                    remediation="Use IPv4 addresses or CIDRs.",
                ) from None
            raise InvalidRequest(
                f"{field}: `{entry[:64]}` is not an IPv4 address or CIDR"
            ) from None
        if network.version != 4:
            raise NotSupported(
                f"{field}: IPv6 is not supported yet", remediation="Use IPv4 addresses or CIDRs."
            )


def check_sources(image: str | None, layers: Sequence[str]) -> None:
    """Check references, as far as no node is needed for it.

    Raises:
        InvalidRequest: the message names the field.
    """
    if len(layers) > limits.CREATE_LAYERS_MAX:
        raise InvalidRequest(f"layers: at most {limits.CREATE_LAYERS_MAX}")
    for field, text in [("image", image), *(("layers", text) for text in layers)]:
        if text is None:
            continue
        if not text or len(text) > limits.IMAGE_REFERENCE_CHARS_MAX or not text.isprintable():
            raise InvalidRequest(
                f"{field}: not a reference of an image: 1 to "
                f"{limits.IMAGE_REFERENCE_CHARS_MAX} printable characters"
            )
