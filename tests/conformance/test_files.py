# SPDX-License-Identifier: AGPL-3.0-only
"""Files."""

from __future__ import annotations

import urllib.request
import uuid

import pytest

from opendsec import FileNotFound, Sandbox

from .kit import status_of_url, until


def test_text_and_bytes_are_read_back(sandbox: Sandbox) -> None:
    sandbox.files.write("a.txt", "text ünï")
    sandbox.files.write("b.bin", b"\0\xff")
    assert sandbox.files.read_text("a.txt") == "text ünï"
    assert sandbox.files.read("b.bin") == b"\0\xff"
    assert sandbox.exec("cat a.txt").stdout == "text ünï"


def test_a_file_belongs_to_who_wrote_it(sandbox: Sandbox) -> None:
    info = sandbox.files.write("mine.txt", "x")
    assert sandbox.files.stat("mine.txt").owner == "user"
    assert info.path == "/home/user/mine.txt"
    sandbox.files.write("/root/theirs.txt", "x", user="root")
    assert sandbox.files.stat("/root/theirs.txt", user="root").owner == "root"


def test_a_large_file_is_whole(sandbox: Sandbox) -> None:
    blob = bytes(range(256)) * 4096 * 8
    sandbox.files.write("large.bin", blob)
    assert sandbox.files.read("large.bin") == blob


def test_odd_names_are_kept(sandbox: Sandbox) -> None:
    for name in ("ünï cödé.txt", "a+b&c=d.txt", "x/y/z.txt", 'quo"te.txt'):
        sandbox.files.write(f"odd/{name}", name)
        assert sandbox.files.read_text(f"odd/{name}") == name


def test_move_list_and_remove(sandbox: Sandbox) -> None:
    folder = uuid.uuid4().hex
    sandbox.files.write(f"{folder}/one.txt", "1")
    sandbox.files.move(f"{folder}/one.txt", f"{folder}/two.txt")
    assert [entry.name for entry in sandbox.files.list(folder)] == ["two.txt"]
    sandbox.files.remove(folder)
    assert not sandbox.files.exists(folder)


def test_a_missing_file_is_typed(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFound) as caught:
        sandbox.files.read("/no/such/file")
    assert caught.value.fault == "user"


def test_changes_can_be_watched(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("watched")
    with sandbox.files.watch("watched") as changes:
        sandbox.files.write("watched/new.txt", "x")
        kinds = []
        for change in changes:
            assert change.name == "new.txt"
            kinds.append(change.type)
            if change.type == "write":
                break
    assert kinds[0] == "create"


def test_a_signed_url_needs_no_key(sandbox: Sandbox) -> None:
    sandbox.files.write("signed.txt", "by url")
    url = sandbox.files.download_url("signed.txt", expires_in_s=60)
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.read() == b"by url"
    assert status_of_url(url.replace("signature=v1_", "signature=v1_x")) in (401, 502)


def test_files_of_a_sibling_are_not_seen(sandbox: Sandbox, make) -> None:  # type: ignore[no-untyped-def]
    sandbox.files.write("/tmp/of-one.txt", "x")
    other = make()
    assert not other.files.exists("/tmp/of-one.txt")
    other.files.write("/etc/of-other.txt", "x", user="root")
    until(lambda: not sandbox.files.exists("/etc/of-other.txt"), "layers are shared writable")


def test_a_file_system_that_takes_links_and_modes(sandbox: Sandbox) -> None:
    run = sandbox.exec(
        "set -e; mkdir -p fs; cd fs; echo x > f; ln f hard; ln -s f soft; chmod 751 f; "
        'mkfifo pipe; python3 -c \'import os; os.setxattr("f", "user.k", b"v"); '
        'print(os.getxattr("f", "user.k").decode())\'; stat -c %a%h f; readlink soft'
    )
    assert run.stdout == "v\n7512\nf\n", run.stderr
