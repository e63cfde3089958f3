"""The run directory is prepared once, and trouble with it is one line."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disk import file_size_limit
from tlt_pipeline.rundir import RunDir, RunDirError, StorageError, prepare_run_dir, write_atomic


def test_prepared_directory_keeps_its_id(tmp_path: Path):
    run = prepare_run_dir(tmp_path / "runs" / "one", "my run/1")
    assert run.run_id().startswith("my-run-1-")
    assert prepare_run_dir(run.root, "other").run_id() == run.run_id()
    for folder in (run.weights, run.checkpoints, run.journal, run.logs, run.blobs, run.tensorboard, run.redis):
        assert folder.is_dir()
    assert run.log("rollout", 1).name == "rollout-1.log"
    assert run.log("learner").name == "learner.log"


def test_two_runs_of_one_name_have_two_ids(tmp_path: Path):
    ids = {prepare_run_dir(tmp_path / str(number), "run").run_id() for number in range(20)}
    assert len(ids) == 20


def test_processes_that_race_agree_on_the_id(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: prepare_run_dir(tmp_path / "run", "run").run_id(), range(16)))
    assert len(ids) == 1
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]


def test_a_fresh_run_does_not_go_over_another(tmp_path: Path):
    prepare_run_dir(tmp_path, "run", fresh=True)
    with pytest.raises(RunDirError, match="--resume"):
        prepare_run_dir(tmp_path, "run", fresh=True)


def test_a_directory_without_run_says_so(tmp_path: Path):
    with pytest.raises(RunDirError, match="holds no run"):
        RunDir(tmp_path).run_id()


def test_a_file_in_the_way_says_so(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="--run-dir"):
        prepare_run_dir(tmp_path / "run", "run")


def test_a_directory_that_is_not_writable_says_so():
    with pytest.raises((RunDirError, StorageError), match="/proc/run"):
        prepare_run_dir("/proc/run", "run")


def test_atomic_write_replaces(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_full_disk_keeps_the_old_file(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    with file_size_limit(100), pytest.raises(StorageError, match=r"no space left for .*summary.json"):
        write_atomic(path, "x" * 10_000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]
