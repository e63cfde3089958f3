"""What a killed launcher leaves in memory goes when the next run starts; what a living run holds stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_settings

from tlt_pipeline.blobs import hidden_states_root
from tlt_pipeline.config import ConfigError, RunConfig
from tlt_pipeline.rundir import RunDir, RunDirError
from tlt_services.leftovers import claim_shards, holding_shards, remove_shards, sole_launcher


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(tiny_settings(tmp_path, hidden_states__root=str(tmp_path / "memory")))


def make_run(tmp_path: Path, config: RunConfig, name: str) -> tuple[RunDir, Path]:
    """A run with shards in memory."""
    run = RunDir(tmp_path / name)
    run.root.mkdir()
    run.run_id_file.write_text(name)
    shards = hidden_states_root(config.hidden_states, run)
    claim_shards(config, run)
    (shards / "a-shard").write_bytes(b"states")
    return run, shards


def test_only_shards_of_runs_that_are_gone_are_removed(tmp_path: Path, config: RunConfig) -> None:
    alive, of_alive = make_run(tmp_path, config, "alive")
    with sole_launcher(alive):
        killed, of_killed = make_run(tmp_path, config, "killed")
        with sole_launcher(killed):
            pass
        foreign = of_killed.with_name("nobody-knows")
        foreign.mkdir()
        _, of_next = make_run(tmp_path, config, "next")
        assert of_alive.is_dir() and of_next.is_dir() and foreign.is_dir()
        assert not of_killed.exists()
        remove_shards(config, alive)
        assert sorted(path.name for path in of_alive.parent.iterdir()) == ["next", "next.run", "nobody-knows"]


def test_a_stopped_run_has_its_shards_again_when_it_is_resumed(tmp_path: Path, config: RunConfig) -> None:
    run, shards = make_run(tmp_path, config, "stopped")
    (shards / ".writing-half").write_bytes(b"sta")
    with holding_shards(config, run):
        pass
    assert not shards.exists() and [path.name for path in run.blobs.iterdir()] == ["a-shard"]
    with holding_shards(config, run):
        assert (shards / "a-shard").read_bytes() == b"states" and not list(run.blobs.iterdir())
        (shards / "a-shard").unlink()  # the run is over
    assert not shards.exists() and not list(run.blobs.iterdir())


def test_a_folder_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "memory").write_text("a file")
    with pytest.raises(ConfigError, match=r"hidden states can't go to .*: set hidden_states\.root"):
        make_run(tmp_path, config, "one")


def test_two_launchers_of_one_run_are_refused(tmp_path: Path, config: RunConfig) -> None:
    run, _ = make_run(tmp_path, config, "one")
    with sole_launcher(run), pytest.raises(RunDirError, match="in use by another tlt run"), sole_launcher(run):
        pass
