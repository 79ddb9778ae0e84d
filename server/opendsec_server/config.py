# SPDX-License-Identifier: AGPL-3.0-only
"""Settings: one TOML file, overridden by ``OPENDSEC_<NAME>`` environment variables."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

DEFAULT_CONFIG_PATH = Path("/etc/opendsec/config.toml")
_LISTS = (
    "dns_servers",
    "passthrough_devices",
    "insecure_registries",
    "image_import_dirs",
    "lazy_sources",
    "image_registries",
)

_TABLES = ("registry_mirrors", "nodes")


class ConfigError(Exception):
    """A setting is unknown, malformed or contradicts another. The message names it."""


class NodeAddress(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One ``[[nodes]]`` of a gateway."""

    url: str
    """``http://host:port``, ``https://host:port`` or ``unix:/path``."""
    name: str | None = None
    """For people. None: the address."""
    secret_file: str | None = None
    """What this node and the gateway prove to each other that they hold. None:
    ``node_secret_file``, which is every other node's, too."""


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings of one ``opendsecd``. Several instances on one machine need their own
    ``state_dir``, ``run_dir``, ``instance``, ``listen`` and ``network_cidr``."""

    # Where things are kept
    state_dir: str = "/var/lib/opendsec"
    """Journal, store, images, sandbox disks. Root only."""
    run_dir: str = "/run/opendsec"
    """Sockets, pid files, OCI runtime state. Gone after a reboot."""
    instance: str = "od"
    """Prefix of kernel names (links, nft table, cgroup). 1 to 5 of [a-z0-9]."""

    # The one port
    listen: str = "127.0.0.1:7300"
    """Address of the edge. Everything is served here."""
    domain: str = "localhost:7300"
    """What ``<port>-<id>.<domain>`` is built from; may carry a port."""
    tls_cert: str | None = None
    tls_key: str | None = None

    # The node
    oci_runtime: str = "crun"
    """Name or path: crun, runc, or another with the same command line."""
    default_backend: Literal["auto", "container", "microvm", "vm"] = "auto"
    """What a create gets that names none. auto: microvm where guests run on the processor (KVM),
    else container."""
    vmm: Literal["auto", "firecracker", "qemu"] = "auto"
    """Program behind microVMs. auto: Firecracker where it and a working KVM exist, else QEMU."""
    firecracker_path: str | None = None
    """None: OPENDSEC_FIRECRACKER, then PATH, then the install folder. A static binary."""
    jailer_path: str | None = None
    """None: OPENDSEC_JAILER, then beside Firecracker, then PATH."""
    qemu_path: str | None = None
    """None: OPENDSEC_QEMU, then qemu-system-<machine> in PATH."""
    guest_kernel_path: str | None = None
    """Packaged Linux kernel (vmlinuz) for microVMs. None: one is fetched from the distribution."""
    firmware_dir: str | None = None
    """Where UEFI firmware for full virtual machines is (OVMF_CODE*.fd and OVMF_VARS*.fd). None:
    where distributions put it."""
    passthrough_devices: tuple[str, ...] = ()
    """PCI addresses of devices that sandboxes of the backend vm may be given, e.g. 0000:65:00.0.
    Each must be bound to vfio-pci, with its whole IOMMU group."""
    network_cidr: str = "10.201.0.0/16"
    """Addresses of the slots. Must not overlap a network the host uses."""
    slots_ready: int = 16
    """Ready-made network slots kept in the pool."""
    sandboxes_max: int = 4_096
    disk_pool_mb: int = 0
    """Size of the sandbox disk pool (sparse). 0: 80 % of the free space at first start."""
    pause_swap: Literal["none", "zram", "file"] = "none"
    """Where the memory of paused containers goes. zram: compressed, in memory. file: in
    ``state_dir``. none: only to swap that the host has anyway; without any, a pause frees caches.
    The kernel uses it for the whole host, after swap that is there already."""
    pause_swap_mb: int = 0
    """Its size in MiB; of zram, before compression."""
    user_namespaces: Literal["auto", "off"] = "auto"
    dns_servers: tuple[str, ...] = ()
    """Resolvers for sandboxes. Empty: those of the host."""
    extra_ca_certs: str | None = None
    """PEM file added to sandboxes' trust store. None: the host's own bundle if it differs."""

    # Images
    image_store_mb: int = 0
    """What all images may take; those that nothing uses go first, by their last use. 0: no
    limit but the disk."""
    image_size_max_mb: int = 32_768
    """The most that the files of one pulled image may hold, unpacked."""
    registry_auth_file: str | None = None
    """Credentials of registries, as docker and podman keep them. None: root's own docker
    configuration, if there is one. Every project may pull with them."""
    insecure_registries: tuple[str, ...] = ()
    """Registries (host:port) that may be asked without TLS or with any certificate. Those on this
    machine's loopback always may."""
    registry_mirrors: dict[str, tuple[str, ...]] = {}
    """Registry → places (host:port) that are asked before it, in order."""
    registry_stall_s: float = 60.0
    """A registry that sends next to nothing of a layer for this long is too slow."""
    image_import_dirs: tuple[str, ...] = ()
    """Directories of this machine from which images may be imported (oci:, oci-archive:,
    docker-archive:, tar:). Empty: none."""
    lazy_sources: tuple[str, ...] = ()
    """Stores whose images callers may start on demand (lazy+https:, lazy+http:, lazy+dir:):
    addresses and directories that theirs must lie below. Empty: none; root may attach any."""

    agent_path: str | None = None
    """Guest agent binary. None: OPENDSEC_AGENT, then the installed package, then PATH."""
    edge_path: str | None = None
    """Edge binary, found the same way."""

    # The control plane
    database_url: str | None = None
    """SQLAlchemy URL. None: SQLite in ``state_dir``."""
    e2b_fork_of_containers: Literal["filesystem", "refuse"] = "filesystem"
    """E2B's forks and snapshots hold memory, which containers cannot save. filesystem: theirs hold
    the disk only, and a response header says so. refuse: 501."""

    # Several nodes
    role: Literal["all-in-one", "gateway", "node"] = "all-in-one"
    """node: serve sandboxes to gateways, at ``node_listen``. gateway: API and edge, over ``nodes``.
    all-in-one: both, and over ``nodes`` too, if there are any."""
    nodes: tuple[NodeAddress, ...] = ()
    """Nodes on other machines, or in other processes."""
    node_listen: str | None = None
    """Where a node serves gateways: ``host:port`` or ``unix:/path``. None: not at all."""
    node_secret_file: str | None = None
    """What gateways and nodes prove to each other that they hold. None: ``node-secret`` in
    ``state_dir``, which the first start of a node makes. A gateway uses it for every node that has
    no ``secret_file`` of its own."""
    node_http_allowed: bool = False
    """Whether a gateway may reach nodes on other machines in clear text (``http:``)."""
    node_tls_cert: str | None = None
    node_tls_key: str | None = None
    """Of ``node_listen``."""
    node_tls_ca: str | None = None
    """PEM file with whom a gateway trusts at https addresses of nodes. None: whom the host does."""
    node_lost_after_s: float = 600.0
    """What ran on a node that cannot be reached for so long counts as lost: its records end, so
    that callers make others. If the node comes back, it ends them too. Paused sandboxes stay."""

    # Function calls
    function_workers_max: int = 64
    """Workers of all function pools together. Projects that want more share them fairly."""

    audit_reads: bool = False
    """Calls that only read are in the audit log too. Those that are refused always are."""
    image_registries: tuple[str, ...] = ()
    """Registries (host[:port]) that projects may pull from and push to; ``*.`` stands for any
    name before it. Empty: all. The installation's own project is not bound."""

    # Builds of templates
    build_backend: Literal["container", "microvm"] = "container"
    """What build steps run in. microvm: a kernel of their own, where projects are not trusted."""
    builds_parallel_max: int = 2
    """Builds that run at once; of others each project has its turn, in the order of their start."""
    project_builds_max: int = 20
    """Builds of one project that run or wait; one more is refused."""
    build_timeout_s: int = 3_600
    """Time of one build, from its first step to its last."""
    build_disk_mb: int = 20_480
    """What one step may write."""
    build_internet: bool = True
    """Whether steps reach the internet."""
    build_upload_max_mb: int = 1_024
    """Size of the archive of one COPY, compressed or not, as it is sent."""
    build_uploads_max_mb: int = 20_480
    """What a project's archives may take together. Those not used for a week go."""

    log_format: Literal["auto", "json", "console"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir)

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    @property
    def api_socket(self) -> Path:
        """The public API, behind the edge."""
        return self.run_path / "api.sock"

    @property
    def control_socket(self) -> Path:
        """Routes and invalidations for the edge. Never proxied."""
        return self.run_path / "control.sock"

    @property
    def node_secret_path(self) -> Path:
        """What gateways and nodes share."""
        if self.node_secret_file is not None:
            return Path(self.node_secret_file)
        return self.state_path / "node-secret"

    @property
    def api_key_file(self) -> Path:
        """The first key, made on first start, readable by root only."""
        return self.state_path / "api-key"


def _from_environment(name: str, raw: str) -> object:
    """A list is separated by commas; a table is JSON."""
    if name in _LISTS:
        return raw.split(",")
    if name in _TABLES:
        try:
            return msgspec.json.decode(raw)
        except msgspec.DecodeError as exc:
            raise ConfigError(f"OPENDSEC_{name.upper()} is not JSON: {exc}") from exc
    return raw


def load_config(path: Path | None = None, environ: dict[str, str] | None = None) -> Config:
    """Read settings.

    Args:
        path: TOML file. None: ``OPENDSEC_CONFIG``, else ``/etc/opendsec/config.toml`` if it exists.
        environ: Environment; None: the process's.

    Raises:
        ConfigError: the file is missing, is not TOML, or holds an unknown or malformed setting.
    """
    env = dict(os.environ) if environ is None else environ
    if path is None:
        path = Path(env["OPENDSEC_CONFIG"]) if "OPENDSEC_CONFIG" in env else DEFAULT_CONFIG_PATH
        if path == DEFAULT_CONFIG_PATH and not path.exists():
            path = None
    values: dict[str, object] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as exc:
            raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    for field in msgspec.structs.fields(Config):
        name = f"OPENDSEC_{field.name.upper()}"
        if name in env:
            raw = env[name]
            values[field.name] = _from_environment(field.name, raw)
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path or 'environment'}: {exc}") from exc
    if not (1 <= len(config.instance) <= 5 and config.instance.isalnum()):
        raise ConfigError("instance: 1 to 5 of [a-z0-9]")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tls_cert and tls_key must be set together")
    if (config.node_tls_cert is None) != (config.node_tls_key is None):
        raise ConfigError("node_tls_cert and node_tls_key must be set together")
    if config.role == "node" and config.node_listen is None:
        raise ConfigError("role node needs node_listen: host:port or unix:/path")
    if config.role == "node" and config.nodes:
        raise ConfigError("nodes: only a gateway, or an all-in-one server, has other nodes")
    if config.role == "gateway" and not config.nodes:
        raise ConfigError("role gateway needs at least one [[nodes]] with its url")
    if config.pause_swap != "none" and config.pause_swap_mb < 1:
        raise ConfigError("pause_swap needs a size: set pause_swap_mb")
    return config
