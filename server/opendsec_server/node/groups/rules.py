# SPDX-License-Identifier: AGPL-3.0-only
"""A group's network as nftables commands: what the host lets through, and each member's namespace.

The host decides: a packet passes from one sandbox to another only if both links and both addresses
are a pair of its set. The members' own namespaces hold the same by address, and refuse at once what
the host would drop.

To add costs 0.3 ms; to let go of anything the kernel waits for a grace period of some 15 ms, during
which no other slot is made. So what goes is put together, and a fresh namespace is only added to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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

Way = tuple[End, End]
"""Between two sandboxes, both ways. The lesser end comes first."""

WAYS_AT_ONCE_MAX = 1_000
"""What fits into one request to the slot maker."""

_EMPTIED = """\
flush chain inet sandbox names_turn
flush chain inet sandbox names_limit
flush chain inet sandbox names_patience
flush set inet sandbox names
"""

_QUESTIONS_PER_SECOND = 200
_QUESTIONS_BURST = 400
"""Of one member. One look-up of a static program is up to six questions."""


def way(one: End, other: End) -> Way:
    """The way between two ends."""
    return (one, other) if one < other else (other, one)


def _pairs(ways: Iterable[Way]) -> str:
    return ", ".join(
        f'"{link}" . {address} . "{other_link}" . {other_address}'
        for one, other in ways
        for (link, address), (other_link, other_address) in ((one, other), (other, one))
    )


def connect(instance: str, ways: Collection[Way]) -> str:
    """Commands for the host: these pairs reach each other, both ways."""
    if not ways:
        return ""
    return f"add element inet {table_name(instance)} {PEERS} {{ {_pairs(ways)} }}\n"


def disconnect(instance: str, ways: Collection[Way]) -> str:
    """Undo ``connect``. Also of pairs that are not there: what is removed is added first."""
    if not ways:
        return ""
    place = f"inet {table_name(instance)} {PEERS} {{ {_pairs(ways)} }}\n"
    return f"add element {place}delete element {place}"


def disconnect_all(instance: str) -> str:
    """No sandbox reaches another. ``connect`` may follow in the same transaction."""
    return f"flush set inet {table_name(instance)} {PEERS}\n"


def add_peers(addresses: Collection[str]) -> str:
    """Commands for a member's namespace: these are others of its group."""
    if not addresses:
        return ""
    return f"add element inet sandbox peers {{ {', '.join(sorted(addresses))} }}\n"


def replace_peers(addresses: Collection[str]) -> str:
    """Commands for a member's namespace: these are the others, and only these."""
    return "flush set inet sandbox peers\n" + add_peers(addresses)


def names_inside(*, forwarded: bool, fresh: bool) -> str:
    """Commands for a member's namespace: questions to the resolvers go to the node's answerer.

    Args:
        forwarded: For a slot with a machine behind a tap.
        fresh: The namespace has none of it yet.

    While nobody answers, questions are not refused: resolvers in programs would give up at once,
    instead of asking again.
    """
    if forwarded:
        hook, target, asks = "prerouting", TAP_ADDRESS, f'iifname "{TAP}" '
        judged = "input"
    else:
        hook, target, asks = "output", NAMES_ADDRESS, ""
        judged = "output"
    emptied = "" if fresh else _EMPTIED
    return f"""
table inet sandbox {{
  chain names_turn {{ type nat hook {hook} priority -100; policy accept; }}
  chain names_limit {{ type filter hook {judged} priority -5; policy accept; }}
  chain names_patience {{ type filter hook output priority -4; policy accept; }}
}}
{emptied}add element inet sandbox names {{ {", ".join(RESOLVERS)} }}
add rule inet sandbox names_turn {asks}ip daddr @names meta l4proto {{ tcp, udp }} \
th dport 53 dnat ip to {target}:{NAMES_PORT}
add rule inet sandbox names_limit {asks}{NAMES_QUESTION} ct direction original \
limit rate over {_QUESTIONS_PER_SECOND}/second burst {_QUESTIONS_BURST} packets drop
add rule inet sandbox names_patience icmp type destination-unreachable \
ct original ip daddr @names drop
"""
