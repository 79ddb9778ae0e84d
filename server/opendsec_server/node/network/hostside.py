# SPDX-License-Identifier: AGPL-3.0-only
"""What an instance changes on the host's own network, and how it is undone."""

from __future__ import annotations

import contextlib
from typing import Any

from opendsec_server.config import Config, ConfigError
from opendsec_server.node.journal import Journal
from opendsec_server.node.process import run

from . import hosttable
from .dns import host_resolvers
from .slots import SlotMakerClient, SlotMakerError

_META_FORWARDING = "forwarding_was_off"
_TOOL_TIMEOUT_S = 10.0
_DOCKER_CHAIN = "DOCKER-USER"


class HostSide:
    """The static table, forwarding, resolvers, and peace with a packet filter that drops.

    Args:
        config: Instance, network, resolvers.
        journal: Remembers what was changed.
        maker: Applies rulesets.
    """

    def __init__(self, config: Config, journal: Journal, maker: SlotMakerClient) -> None:
        self._config = config
        self._journal = journal
        self._maker = maker
        self._resolvers: tuple[str, ...] = ()
        self._forward_dropped = False
        self._docker_rules = False

    async def set_up(self) -> None:
        """Idempotent.

        Raises:
            ConfigError: nftables refused the table.
        """
        if not hosttable.forwarding_enabled():
            await self._journal.set_meta(_META_FORWARDING, "1")
            hosttable.set_forwarding(True)
        self._resolvers = host_resolvers(self._config.dns_servers)
        await self._apply()
        await self._mind_forward_policy()

    async def _apply(self) -> None:
        rules = hosttable.ruleset(self._config.instance, self._config.network_cidr, self._resolvers)
        try:
            await self._maker.ask("host", commands=rules)
        except SlotMakerError as exc:
            raise ConfigError(f"nftables refused the host's table: {exc}") from exc

    async def refresh_resolvers(self) -> None:
        """Follow a change of the host's resolvers."""
        now = host_resolvers(self._config.dns_servers)
        if now != self._resolvers:
            self._resolvers = now
            await self._apply()

    async def _mind_forward_policy(self) -> None:
        """Docker and some firewalls set the FORWARD policy to drop. Where Docker is, it offers a
        chain of the administrator's own; elsewhere we only report."""
        try:
            answer, _ = await self._maker.ask("host", commands="list chain ip filter FORWARD\n")
        except SlotMakerError:
            return
        self._forward_dropped = "policy drop" in answer["output"]
        if not self._forward_dropped:
            return
        self._docker_rules = True
        for rule in self._docker_accepts():
            if await self._iptables("-C", *rule) != 0 and await self._iptables("-I", *rule) != 0:
                self._docker_rules = False

    def _docker_accepts(self) -> tuple[tuple[str, ...], ...]:
        links = f"{self._config.instance}-+"
        return (
            (_DOCKER_CHAIN, "-i", links, "-j", "ACCEPT"),
            (_DOCKER_CHAIN, "-o", links, "-j", "ACCEPT"),
        )

    async def _iptables(self, *arguments: str) -> int:
        try:
            done = await run(["iptables", "-w", *arguments], timeout_s=_TOOL_TIMEOUT_S)
        except FileNotFoundError:
            return 127
        return done.code

    async def tear_down(self) -> None:
        """Undo ``set_up``. Idempotent."""
        with contextlib.suppress(SlotMakerError):
            await self._maker.ask("host", commands=hosttable.removal(self._config.instance))
        if self._docker_rules:
            for rule in self._docker_accepts():
                await self._iptables("-D", *rule)
        if await self._journal.get_meta(_META_FORWARDING) and not await self._other_instances():
            hosttable.set_forwarding(False)
        await self._journal.set_meta(_META_FORWARDING, None)

    async def _other_instances(self) -> bool:
        answer, _ = await self._maker.ask("host", commands="list tables\n")
        return "opendsec_" in answer["output"]

    def features(self) -> dict[str, Any]:
        """For people and doctor."""
        return {
            "resolvers": list(self._resolvers),
            "forward_policy_drop": self._forward_dropped,
            "forward_accepted": not self._forward_dropped or self._docker_rules,
        }

    @property
    def resolvers(self) -> tuple[str, ...]:
        """Where sandboxes' questions are sent to."""
        return self._resolvers

    @property
    def route_localnet(self) -> bool:
        """Whether slots' links must let packets through to a resolver on the loopback."""
        return hosttable.need_route_localnet(self._resolvers)
