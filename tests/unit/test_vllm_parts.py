"""What of the vLLM engine can be tried without vLLM: settings, steering, counts, memory. The rest is in tests/vllm."""

from __future__ import annotations

import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tlt_pipeline.config import ConfigError, EngineConfig, SpeculationConfig, validate_config
from tlt_pipeline.engine.vllm_engine import draft_stats
from tlt_pipeline.engine.vllm_memory import release_pages
from tlt_pipeline.engine.vllm_settings import speculative_arguments, temperature_objection
from tlt_pipeline.engine.vllm_steering import Steering
from tlt_pipeline.engine.vllm_version import installed_vllm, require_vllm
from tlt_pipeline.messages import DrafterUse


def steered(**speculation) -> tuple[Steering, list[tuple[int, int, int]]]:
    told: list[tuple[int, int, int]] = []
    return Steering(SpeculationConfig(**speculation), lambda *table: told.append(table)), told


def test_depth_is_told_once_for_each_size_of_batch():
    steering, told = steered(choice="fixed", depth=3)
    steering.steer(5)
    steering.new_drafter()
    for batch in (5, 6, 8, 1):
        steering.steer(batch)
    assert told == [(5, 8, 0), (5, 8, 3), (1, 1, 3)]  # nothing to propose before there is a drafter


def test_only_what_vllm_can_do_is_chosen():
    steering, told = steered(choice="goodput", depth=2)
    steering.new_drafter()
    steering.measured(4, 4, 0, 0, ())  # the time before the first step is no step's
    for _ in range(40):
        steering.measured(4, 10, 4, 8, (4, 2))
        steering.measured(4, 4, 0, 0, ())
    assert {str(strategy) for strategy in steering.strategies} == {"off", "eagle-1", "eagle-2"}
    assert set(steering.account.uses) == {("eagle-2", 4), ("off", 4)}
    assert steering.account.uses["eagle-2", 4].accepted == [160, 80]
    assert all(depth <= 2 for _, _, depth in told)


def test_steps_without_proposals_have_a_reason():
    steering, _ = steered(choice="fixed", max_batch=2)
    steering.steer(1)
    for _ in range(2):
        steering.measured(1, 1, 0, 0, ())
    steering.new_drafter()
    steering.measured(3, 3, 0, 0, ())
    assert steering.account.not_speculated == {"no_drafter": 1, "above_max_batch": 1}


def test_an_answers_drafts_are_read_from_its_histogram():
    metrics = SimpleNamespace(histogram=[5, 3, 0, 2], num_draft_tokens=30)
    stats = draft_stats(metrics, 20, [2, 4])
    assert (stats.drafts, stats.drafted, stats.accepted) == (10, 30, 9)
    assert stats.accepted_by_position == (5, 2, 2)
    assert stats.decode_steps == 11  # the prompt's own step drew one
    assert stats.drafter_versions == (2, 4)
    assert stats.drafters == ()  # nobody knows which of the two proposed what
    assert draft_stats(metrics, 20, [4]).drafters == (DrafterUse(version=4, drafts=10, hits=5),)
    assert draft_stats(None, 7, [2]).model_dump(exclude_defaults=True) == {"decode_steps": 7}


@pytest.mark.parametrize(
    ("speculation", "method", "depth"),
    [({"drafter": "eagle", "depth": 5}, "eagle3", 5), ({"drafter": "ngram", "ngram_depths": (2, 6)}, "ngram", 6)],
)
def test_the_method_and_the_deepest_draft_are_decided_at_start(tmp_path, speculation, method, depth):
    found = speculative_arguments(EngineConfig(max_batch=8, speculation=SpeculationConfig(**speculation)), tmp_path)
    assert found is not None
    assert (found["method"], found["num_speculative_tokens"]) == (method, depth)
    assert found["num_speculative_tokens_per_batch_size"] == [(1, 8, depth)]


def test_off_is_no_speculation(tmp_path):
    assert speculative_arguments(EngineConfig(speculation=SpeculationConfig(drafter="off")), tmp_path) is None


def test_pages_are_given_back_and_read_as_zero():
    tensor = torch.ones(64 * mmap.PAGESIZE, dtype=torch.uint8)
    released = release_pages(tensor)
    assert released >= 62 * mmap.PAGESIZE
    assert int(tensor.sum()) == len(tensor) - released


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"top_k": 5}}, r"top_k and rollout\.top_p can.t be used with engine\.type: vllm"),
        (
            {"drafter": {"kind": "eagle3"}, "hidden_states": {"source": "recompute"}},
            "can.t draft with an eagle3 drafter",
        ),
        ({}, r"set hidden_states\.source to recompute"),
    ],
)
def test_what_vllm_cannot_do_is_refused(settings, message):
    common = {"policy": {"model": "m"}, "task": {"sources": [{"name": "chain_sum"}]}, "engine": {"type": "vllm"}}
    with pytest.raises(ConfigError, match=message):
        validate_config({**common, **settings})


@pytest.mark.skipif(installed_vllm() is not None, reason="vLLM is installed here")
def test_without_vllm_a_line_says_what_to_do():
    with pytest.raises(ConfigError, match="vLLM is not installed here: `make venv-vllm`"):
        require_vllm()


def test_the_engine_loads_without_vllm():
    code = "import sys, tlt_pipeline.engine.vllm_engine; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_temperatures_that_vllm_refuses_have_a_remedy():
    assert [temperature_objection(T) for T in (0.0, 0.01, 1.0, 2.0)] == [None] * 4
    for T in (0.001, 5.0):
        objection = temperature_objection(T)
        assert objection is not None
        assert "engine.type: native" in objection
