"""Blobs are whole or refused, whatever lies in their folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.disk import file_size_limit
from tlt_pipeline.blobs import BlobCorrupt, BlobMissing, FileBlobs
from tlt_pipeline.rundir import StorageError


@pytest.fixture
def store(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


def test_reads_what_was_written(store: FileBlobs):
    data = os.urandom(100_000)
    ref = store.write("a.safetensors", data)
    assert ref.size == len(data)
    assert store.read(ref) == data
    assert store.names() == ["a.safetensors"]
    assert store.bytes_used() == len(data)


def test_other_process_reads_by_reference_alone(store: FileBlobs):
    ref = store.write("a", b"content")
    assert FileBlobs(store.root).read(ref) == b"content"


def test_only_the_owner_may_enter(store: FileBlobs):
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


def test_deleted_blob_is_missing(store: FileBlobs):
    ref = store.write("a", b"content")
    store.delete("a")
    store.delete("a")
    with pytest.raises(BlobMissing, match="a"):
        store.read(ref)
    assert store.bytes_used() == 0


def test_blobs_that_nobody_knows_are_removed_when_they_are_old(store: FileBlobs):
    for name in ("known", "orphan", "new"):
        store.write(name, b"content")
    (store.root / ".writing-half").write_bytes(b"con")
    for name in ("known", "orphan", ".writing-half"):
        os.utime(store.root / name, (0, 0))
    assert store.remove_unknown({"known"}) == 2
    assert sorted(path.name for path in store.root.iterdir()) == ["known", "new"]


def test_rewritten_blob_fails_old_references(store: FileBlobs):
    old = store.write("a", b"first")
    new = store.write("a", b"other")
    assert store.read(new) == b"other"
    with pytest.raises(BlobCorrupt, match="content"):
        store.read(old)


def test_wrong_size_is_refused(store: FileBlobs):
    ref = store.write("a", b"content")
    (store.root / "a").write_bytes(b"conten")
    with pytest.raises(BlobCorrupt, match="6 bytes"):
        store.read(ref)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", ".", "..", ".hidden", "a/b", "a\x00b", "x" * 300])
def test_names_that_leave_the_folder_are_refused(store: FileBlobs, name: str):
    ref = store.write("a", b"content").model_copy(update={"name": name})
    with pytest.raises(BlobCorrupt):
        store.read(ref)
    with pytest.raises(ValueError, match="blob name"):
        store.write(name, b"content")
    with pytest.raises(ValueError, match="blob name"):
        store.delete(name)


def test_symbolic_links_are_not_followed(store: FileBlobs, tmp_path: Path):
    ref = store.write("a", b"content")
    (tmp_path / "elsewhere").write_bytes(b"content")
    (store.root / "a").unlink()
    (store.root / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlobCorrupt):
        store.read(ref)


def test_a_pipe_in_the_blobs_place_does_not_hang(store: FileBlobs):
    ref = store.write("a", b"content")
    (store.root / "a").unlink()
    os.mkfifo(store.root / "a")
    with pytest.raises(BlobCorrupt, match="regular"):
        store.read(ref)


def test_full_disk_is_one_line_and_leaves_nothing(store: FileBlobs):
    store.write("old", b"stays")
    with file_size_limit(1000), pytest.raises(StorageError, match=r"no space left for .*new.*--resume"):
        store.write("new", bytes(100_000))
    assert store.names() == ["old"]
    assert store.bytes_used() == 5


def test_what_dead_writers_left_is_removed_once_old(store: FileBlobs):
    old, young = store.root / ".writing-a-1", store.root / ".writing-b-2"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert FileBlobs(store.root).names() == []
    assert not old.exists()
    assert young.exists()
