# SPDX-License-Identifier: AGPL-3.0-only
"""What a batch asks for: the parameters of all items, and where some differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, NotSupported
from opendsec_server.control.params import CreateParams, check_params, digest

_FIELDS = CreateParams.__struct_fields__


class BatchParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Canonical parameters of a batch. Kept with it as JSON."""

    count: int
    common: CreateParams
    differing: dict[str, dict[str, Any]] = {}
    """By index: the fields of an item that are not as in ``common``, as JSON has them."""
    wait_s: int = limits.BATCH_WAIT_S_DEFAULT
    """How long an item may wait for its turn."""

    @classmethod
    def of(
        cls,
        common: CreateParams,
        items: Sequence[CreateParams] | None,
        *,
        count: int,
        wait_s: int,
    ) -> Self:
        """The canonical form of a request.

        Args:
            common: Of all items; of which nothing need hold when each is given.
            items: Each item's own. None: all are as ``common``.
            count: How many; of no meaning when the items are given.
            wait_s: How long an item may wait for its turn.

        Raises:
            InvalidRequest, NotSupported: an item cannot be; the message names it.
        """
        if items is None:
            if not 1 <= count <= limits.BATCH_ITEMS_MAX:
                raise InvalidRequest(f"count: 1 to {limits.BATCH_ITEMS_MAX}")
            check_params(common)
            return cls(count=count, common=common, wait_s=wait_s)
        if not 1 <= len(items) <= limits.BATCH_ITEMS_MAX:
            raise InvalidRequest(f"items: 1 to {limits.BATCH_ITEMS_MAX}")
        differing: dict[str, dict[str, Any]] = {}
        plain = msgspec.to_builtins(common)
        checked: set[int] = set()
        for index, item in enumerate(items):
            if id(item) not in checked:
                try:
                    check_params(item)
                except (InvalidRequest, NotSupported) as exc:
                    exc.message = f"items[{index}]: {exc.message}"
                    raise
                # Items without anything of their own are one object.
                checked.add(id(item))
            if item is not common:
                own = msgspec.to_builtins(item)
                delta = {name: own[name] for name in _FIELDS if own[name] != plain[name]}
                if delta:
                    differing[str(index)] = delta
        return cls(count=len(items), common=common, differing=differing, wait_s=wait_s)

    def item(self, index: int) -> CreateParams:
        """The parameters of one item."""
        delta = self.differing.get(str(index))
        if delta is None:
            return self.common
        return msgspec.convert(msgspec.to_builtins(self.common) | delta, CreateParams)

    def sha256(self) -> str:
        """Digest: equal for requests that mean the same."""
        return digest(self, "batch")

    def pack(self) -> str:
        """As it is kept."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def unpack(cls, text: str) -> Self:
        """What ``pack`` made this text of."""
        return msgspec.json.decode(text, type=cls)
