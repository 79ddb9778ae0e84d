# SPDX-License-Identifier: AGPL-3.0-only
"""Rulesets applied through libnftables, the library behind the ``nft`` program.

In process it costs 0.6 ms per ruleset, against 3 to 6 ms for starting ``nft``. Only the slot
maker process loads it, so that a defect in the library cannot end the daemon.
"""

from __future__ import annotations

import ctypes
import ctypes.util


class NftError(Exception):
    """libnftables refused a ruleset; the message is the library's own."""


class Nft:
    """libnftables, loaded.

    Raises:
        NftError: the library is not installed.
    """

    def __init__(self) -> None:
        try:
            lib = ctypes.CDLL("libnftables.so.1")
        except OSError as exc:
            raise NftError("libnftables.so.1 is missing; install the package nftables") from exc
        lib.nft_ctx_new.restype = ctypes.c_void_p
        lib.nft_ctx_new.argtypes = [ctypes.c_uint32]
        for name in ("nft_ctx_free", "nft_ctx_buffer_error", "nft_ctx_buffer_output"):
            getattr(lib, name).argtypes = [ctypes.c_void_p]
        for name in ("nft_ctx_get_error_buffer", "nft_ctx_get_output_buffer"):
            getattr(lib, name).argtypes = [ctypes.c_void_p]
            getattr(lib, name).restype = ctypes.c_char_p
        lib.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._lib = lib

    def run(self, commands: str) -> str:
        """Apply commands as one transaction in the thread's network namespace. Blocks.

        Returns:
            What the commands print (``list`` commands).

        Raises:
            NftError: refused; nothing was changed.
        """
        context = self._lib.nft_ctx_new(0)
        if not context:
            raise NftError("libnftables cannot open netlink")
        try:
            self._lib.nft_ctx_buffer_error(context)
            self._lib.nft_ctx_buffer_output(context)
            if self._lib.nft_run_cmd_from_buffer(context, commands.encode()) != 0:
                text = self._lib.nft_ctx_get_error_buffer(context) or b""
                raise NftError(text.decode(errors="replace").strip())
            output: bytes = self._lib.nft_ctx_get_output_buffer(context) or b""
            return output.decode(errors="replace")
        finally:
            self._lib.nft_ctx_free(context)
