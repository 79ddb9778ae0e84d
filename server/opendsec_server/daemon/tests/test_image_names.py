# SPDX-License-Identifier: AGPL-3.0-only
"""Gateways and nodes mean the same by a reference: a gateway notes by name what a node pulls."""

from __future__ import annotations

import pytest

from opendsec_server.control.image_access import full_name
from opendsec_server.images.references import canonical


@pytest.mark.parametrize(
    "reference",
    [
        "alpine",
        "a/b",
        "library/alpine:3",
        "docker.io/x:1",
        "docker.io/a/b",
        "index.docker.io/x",
        "localhost/x",
        "r.example:5000/a/b",
        "r.example/a@sha256:" + "0" * 64,
        "alpine:3@sha256:" + "0" * 64,
        "HOST/x",
    ],
)
def test_full_names(reference: str) -> None:
    assert full_name(reference) == canonical(reference)
