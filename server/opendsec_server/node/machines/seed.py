# SPDX-License-Identifier: AGPL-3.0-only
"""The seed of a full virtual machine: what its cloud-init finds (datasource NoCloud).

A small read-only ISO 9660 image with the label ``cidata``, made without mounting anything: names
and network of the machine, the guest agent, and user data. Those of the caller and ours are parts
of one MIME message, so neither can undo the other: ours is a boot hook, which shares no key with
any cloud-config.
"""

from __future__ import annotations

import email
import json
import shutil
import tempfile
from dataclasses import dataclass
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from pathlib import Path

from opendsec_server.contract.errors import SandboxStartFailed
from opendsec_server.images.certificates import certificates_in, host_authorities
from opendsec_server.node.network.tap import (
    GUEST_ADDRESS,
    GUEST_MAC,
    PREFIX_LENGTH,
    TAP_ADDRESS,
)
from opendsec_server.node.process import ProgramTimeout, finish_in_thread, run

RESOLVER = "169.254.0.1"
SEED_MB = 16
"""Every seed has this size, so that saved memory fits to the seed of another sandbox."""

AGENT_NAME = "opendsec-agent"
SERVICE = Path(__file__).with_name("guest_service.sh")
_DISTRIBUTION_CERTIFICATES = Path("/usr/share/ca-certificates")
_MAKE_TIMEOUT_S = 60.0
_MIME_MARK = "mime-version:"
_MIME_HEAD_CHARS = 4_096

_BOOT_HOOK = f"""\
#cloud-boothook
#!/bin/sh
# Installs and starts the guest agent. Runs at every boot; does nothing where nothing changed.
seed=$(mktemp -d) || exit 0
for device in /dev/disk/by-label/cidata /dev/disk/by-label/CIDATA "$(blkid -L cidata)"; do
  [ -e "$device" ] && mount -o ro -t iso9660 "$device" "$seed" 2>/dev/null && break
done
[ -e "$seed/{SERVICE.name}" ] && sh "$seed/{SERVICE.name}" "$seed"
umount "$seed" 2>/dev/null
rmdir "$seed" 2>/dev/null
exit 0
"""


@dataclass(frozen=True, slots=True)
class SeedContent:
    """What is in a seed.

    Attributes:
        instance_id: cloud-init does its once-per-machine work anew when this changes.
        hostname: The guest's name.
        user_data: The caller's; None: none.
        agent: The guest agent's binary.
        authorities: PEM certificates to trust beside the guest's own.
    """

    instance_id: str
    hostname: str
    user_data: str | None
    agent: Path
    authorities: list[str]


def extra_authorities(extra_ca_certs: str | None) -> list[str]:
    """What the host trusts beyond its distribution's list, or the setting ``extra_ca_certs``.

    Raises:
        OSError: the file of the setting cannot be read.
    """
    if extra_ca_certs is not None:
        return host_authorities(Path(extra_ca_certs))
    known: set[str] = set()
    for path in _DISTRIBUTION_CERTIFICATES.rglob("*.crt"):
        known.update(certificates_in(path.read_text(errors="replace")))
    return [pem for pem in host_authorities(None) if pem not in known]


def network_config() -> str:
    """The one network card, in cloud-init's format 2."""
    card = {
        "match": {"macaddress": GUEST_MAC.hex(":")},
        "set-name": "eth0",
        "addresses": [f"{GUEST_ADDRESS}/{PREFIX_LENGTH}"],
        "routes": [{"to": "0.0.0.0/0", "via": TAP_ADDRESS}],
        "nameservers": {"addresses": [RESOLVER]},
    }
    # JSON is YAML, and needs no library.
    return json.dumps({"version": 2, "ethernets": {"eth0": card}}, indent=1)


def joined_user_data(theirs: str | None) -> str:
    """One MIME message of our boot hook and the caller's user data.

    Theirs may be in any format that cloud-init takes, several parts (MIME) included; cloud-init
    recognises it by its beginning, as if it had come alone.
    """
    message = MIMEMultipart()
    hook = MIMEText(_BOOT_HOOK, "cloud-boothook", "us-ascii")
    hook.add_header("Content-Disposition", "attachment", filename="opendsec-agent")
    message.attach(hook)
    if theirs is None:
        return message.as_string()
    if _MIME_MARK in theirs[:_MIME_HEAD_CHARS].lower():
        message.attach(email.message_from_string(theirs))
        return message.as_string()
    part = MIMEText(theirs, "plain", "utf-8")
    part.add_header("Content-Disposition", "attachment", filename="user-data")
    message.attach(part)
    return message.as_string()


async def make_seed(content: SeedContent, target: Path) -> None:
    """Write a seed image. ``target`` is replaced whole.

    Raises:
        SandboxStartFailed: xorriso is missing or failed.
    """
    folder = Path(await finish_in_thread(_fill, content))
    half = target.with_suffix(".new")
    try:
        argv = ["xorriso", "-as", "mkisofs", "-quiet", "-V", "cidata", "-J", "-R",
                "-o", str(half), str(folder)]  # fmt: skip
        half.unlink(missing_ok=True)
        try:
            done = await run(argv, timeout_s=_MAKE_TIMEOUT_S)
        except FileNotFoundError as exc:
            raise SandboxStartFailed(
                "xorriso is not installed", remediation="Install the package xorriso."
            ) from exc
        except ProgramTimeout as exc:
            raise SandboxStartFailed(str(exc)) from exc
        if done.code != 0:
            raise SandboxStartFailed(f"xorriso failed: {done.output[-500:]}")
        if half.stat().st_size > SEED_MB << 20:
            raise SandboxStartFailed(f"the seed is larger than {SEED_MB} MiB")
        with half.open("r+b") as file:
            file.truncate(SEED_MB << 20)
        half.rename(target)
    finally:
        half.unlink(missing_ok=True)
        await finish_in_thread(shutil.rmtree, folder, True)


def _fill(content: SeedContent) -> str:
    folder = Path(tempfile.mkdtemp(prefix="opendsec-seed-"))
    try:
        identity = {"instance-id": content.instance_id, "local-hostname": content.hostname}
        (folder / "meta-data").write_text(json.dumps(identity))
        (folder / "network-config").write_text(network_config())
        (folder / "user-data").write_text(joined_user_data(content.user_data))
        shutil.copyfile(content.agent, folder / AGENT_NAME)
        shutil.copyfile(SERVICE, folder / SERVICE.name)
        for index, pem in enumerate(content.authorities):
            # One per file: update-ca-certificates takes no others.
            (folder / f"opendsec-node-{index:03}.crt").write_text(pem + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return str(folder)
