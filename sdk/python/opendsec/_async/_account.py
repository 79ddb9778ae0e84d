# SPDX-License-Identifier: Apache-2.0
"""The API keys of the project."""

from __future__ import annotations

import builtins
from urllib.parse import quote

import msgspec

from opendsec._errors import InvalidRequest, NotFound
from opendsec._models import ApiKey
from opendsec._retry import Repeat

from ._transport import AsyncTransport


class _Keys(msgspec.Struct):
    api_keys: list[ApiKey] = []


class _Nothing(msgspec.Struct):
    pass


class AsyncApiKeys:
    """The keys that open the project of the key in use."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[ApiKey]:
        """All keys, oldest first, without their secrets."""
        return (await self._transport.api("GET", "/v1/api-keys", _Keys)).api_keys

    async def create(self, name: str) -> ApiKey:
        """Make a key. Its ``key`` is in this answer only.

        A call whose answer is lost is not repeated: it would make a second key.

        Raises:
            InvalidRequest: the name is empty or too long.
        """
        return await self._transport.api(
            "POST", "/v1/api-keys", ApiKey, body={"name": name}, repeat=Repeat.IF_UNSENT
        )

    async def delete(self, key_id: str) -> bool:
        """Remove a key, which is refused from then on; False if there is none.

        Raises:
            Conflict: it may not be removed, such as the last one.
        """
        if not key_id:
            raise InvalidRequest("The id of the key is empty.")
        try:
            await self._transport.api("DELETE", f"/v1/api-keys/{quote(key_id, safe='')}", _Nothing)
        except NotFound:
            return False
        return True
