"""The folder of one user: what others could put there first is neither followed nor believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hororing._job import private_folder

STRANGER = 65533
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def test_the_folder_is_made_with_mode_0700_and_found_again(tmp_path: Path):
    path = tmp_path / "own"
    assert private_folder.find([path]) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert private_folder.find([path]) == path


def test_a_file_appears_whole_once_and_for_its_owner_only(tmp_path: Path):
    path = tmp_path / "key"
    private_folder.publish(path, b"first")
    with pytest.raises(FileExistsError):
        private_folder.publish(path, b"second")
    assert private_folder.read(path) == b"first"
    private_folder.publish(path, b"third", replace=True)
    assert private_folder.read(path) == b"third"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("kind", ["file", "link", "open", "fifo"])
def test_another_thing_of_that_name_is_refused_and_the_next_place_taken(tmp_path: Path, kind: str):
    path, second = tmp_path / "own", tmp_path / "second"
    if kind == "file":
        path.write_text("")
    elif kind == "link":
        (tmp_path / "target").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "target")
    elif kind == "open":
        path.mkdir()
        path.chmod(0o755)
    else:
        os.mkfifo(path)
    with pytest.raises(PermissionError, match=r"not a folder|mode 0755"):
        private_folder.open_folder(path)
    assert private_folder.find([path, second]) == second
    with pytest.raises(PermissionError, match=rf"no folder.*{path}: it is.*remove it"):
        private_folder.find([path])


@needs_root
def test_a_folder_of_another_user_is_named_with_its_owner(tmp_path: Path):
    path = tmp_path / "own"
    path.mkdir(mode=0o700)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=rf"belongs to user {STRANGER}"):
        private_folder.open_folder(path)


@pytest.mark.parametrize("kind", ["fifo", "link", "open", "stranger"])
def test_a_file_that_others_can_change_is_not_read(tmp_path: Path, kind: str):
    path = tmp_path / "key"
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "link":
        (tmp_path / "target").write_text("text")
        (tmp_path / "target").chmod(0o600)
        path.symlink_to(tmp_path / "target")
    else:
        path.write_text("text")
        path.chmod(0o644 if kind == "open" else 0o600)
    if kind == "stranger":
        if os.geteuid() != 0:
            pytest.skip("only root can give files to others")
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=r"not a regular file|mode 0644|belongs to user"):
        private_folder.read(path)
