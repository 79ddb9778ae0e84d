# SPDX-License-Identifier: AGPL-3.0-only
"""A group's network as nftables commands: what the host lets through, and each member's namespace.

The host decides: a packet passes from one sandbox to another only if both links and both addresses
are a pair of its set. The members' own namespaces hold the same by address, and refuse at once what
the host would drop.
"""

from __future__ import annotations

from collections.abc import Iterable

from opendsec_server.node.network.hosttable import PEERS, table_name
from opendsec_server.node.network.policy import (
    NAMES_ADDRESS,
    NAMES_PORT,
    NAMES_QUESTION,
    RESOLVERS,
)
from opendsec_server.node.network.tap import TAP, TAP_ADDRESS

End = tuple[str, str]
"""Link and address of a sandbox, as the host sees them."""

_QUESTIONS_PER_SECOND = 200
_QUESTIONS_BURST = 400
"""Of one member. One look-up of a static program is up to six questions."""


def _pairs(ways: Iterable[tuple[End, End]]) -> str:
    return ", ".join(
        f'"{link}" . {address} . "{other_link}" . {other_address}'
        for one, other in ways
        for (link, address), (other_link, other_address) in ((one, other), (other, one))
    )


def connect(instance: str, ways: list[tuple[End, End]]) -> str:
    """Commands for the host: these pairs reach each other, both ways."""
    if not ways:
        return ""
    return f"add element inet {table_name(instance)} {PEERS} {{ {_pairs(ways)} }}\n"


def disconnect(instance: str, ways: list[tuple[End, End]]) -> str:
    """Undo ``connect``. Also of pairs that are not there: what is removed is added first."""
    if not ways:
        return ""
    place = f"inet {table_name(instance)} {PEERS} {{ {_pairs(ways)} }}\n"
    return f"add element {place}delete element {place}"


def disconnect_all(instance: str) -> str:
    """No sandbox reaches another. ``connect`` may follow in the same transaction."""
    return f"flush set inet {table_name(instance)} {PEERS}\n"


def peers_inside(addresses: Iterable[str]) -> str:
    """Commands for a member's namespace: these are the others, and only these."""
    listed = ", ".join(sorted(addresses))
    commands = "flush set inet sandbox peers\n"
    if listed:
        commands += f"add element inet sandbox peers {{ {listed} }}\n"
    return commands


def names_inside(*, forwarded: bool) -> str:
    """Commands for a member's namespace: questions to the resolvers go to the node's answerer.

    Args:
        forwarded: For a slot with a machine behind a tap.

    While nobody answers, questions are not refused: resolvers in programs would give up at once,
    instead of asking again.
    """
    if forwarded:
        hook, target, asks = "prerouting", TAP_ADDRESS, f'iifname "{TAP}" '
        judged = "input"
    else:
        hook, target, asks = "output", NAMES_ADDRESS, ""
        judged = "output"
    return f"""
table inet sandbox {{
  chain names_turn {{ type nat hook {hook} priority -100; policy accept; }}
  chain names_limit {{ type filter hook {judged} priority -5; policy accept; }}
  chain names_patience {{ type filter hook output priority -4; policy accept; }}
}}
flush chain inet sandbox names_turn
flush chain inet sandbox names_limit
flush chain inet sandbox names_patience
flush set inet sandbox names
add element inet sandbox names {{ {", ".join(RESOLVERS)} }}
add rule inet sandbox names_turn {asks}ip daddr @names meta l4proto {{ tcp, udp }} \
th dport 53 dnat ip to {target}:{NAMES_PORT}
add rule inet sandbox names_limit {asks}{NAMES_QUESTION} ct direction original \
limit rate over {_QUESTIONS_PER_SECOND}/second burst {_QUESTIONS_BURST} packets drop
add rule inet sandbox names_patience icmp type destination-unreachable \
ct original ip daddr @names drop
"""
