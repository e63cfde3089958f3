"""Eagle against eagle3: trained on the same batches, measured by decoding what neither has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import samples
from tests.unit.drafter_cases import one_thread  # noqa: F401
from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.messages import Array
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_services import bench_kinds

CONFIGS = Path(__file__).parents[2] / "configs"
POLICY = CONFIGS / "quickstart-policy"


def config(**changes: Any) -> RunConfig:
    settings = {
        "policy.model": POLICY,
        "engine.threads": 1,
        "engine.exact": "off",
        "engine.speculation.depth": 3,
        "rollout.max_new_tokens": 32,
        **changes,
    }
    return load_config(CONFIGS / "quickstart.yaml", [f"{name}={value}" for name, value in settings.items()])


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kinds, "ANSWERS", 32)
    monkeypatch.setattr(bench_kinds, "HELD_OUT", 16)


@pytest.mark.slow
def test_both_kinds_learn_from_the_same_and_are_measured_by_decoding() -> None:
    found = bench_kinds.compare_kinds(config(), 0.3)
    assert (found["strategy"], found["held_out"]) == ("eagle-3", 16)
    assert found["answers"] >= 32 and found["answer_tokens"] > 0
    eagle, eagle3 = found["eagle"], found["eagle3"]
    assert eagle["equal_tokens"]["tokens"] == eagle3["equal_tokens"]["tokens"] > 0
    assert max(kind["equal_tokens"]["seconds"] for kind in (eagle, eagle3)) >= 0.3
    last = [kind["equal_seconds"]["seconds"] for kind in (eagle, eagle3)]
    assert last[0] == pytest.approx(last[1], abs=0.5)
    assert (eagle["unroll_steps"], eagle3["unroll_steps"]) == (1, 3)
    assert eagle["parameters"] != eagle3["parameters"]
    assert eagle["equal_seconds"]["acceptance_length"] > eagle["start"]["acceptance_length"]
    for kind in (eagle, eagle3):
        assert kind["start"]["tokens"] == 0
        assert 1 < kind["start"]["acceptance_length"] != kind["equal_tokens"]["acceptance_length"]
        assert len(kind["start"]["acceptance_by_position"]) == 3
        assert kind["equal_seconds"]["tokens"] >= kind["equal_tokens"]["tokens"]


def test_eagle_reads_the_end_of_what_eagle3_reads() -> None:
    policy, tokenizer = load_decoder(POLICY), load_tokenizer(POLICY)
    size = policy.config.hidden_size
    both = [
        bench_kinds.write_corpus(bench_kinds.of_kind(config(), kind), policy, tokenizer, [], 0.0)
        for kind in bench_kinds.KINDS
    ]
    alone, fused = both[0].documents_for(size), both[1].documents_for(4 * size)
    assert {document.hidden.shape[1] for document in fused} == {4 * size}
    for one, other, cut in zip(alone, fused, both[1].documents_for(size), strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.hidden, cut.hidden)


def test_no_more_is_written_than_a_buffer_holds() -> None:
    policy, tokenizer = load_decoder(POLICY), load_tokenizer(POLICY)
    settings = config(**{"hidden_states.bytes_quota": 100_000})
    corpus = bench_kinds.write_corpus(settings, policy, tokenizer, [], 60.0)
    assert len(corpus.texts) == 32


def test_answers_to_held_out_prompts_are_left_out() -> None:
    policy, tokenizer = load_decoder(POLICY), load_tokenizer(POLICY)
    everything = bench_kinds.write_corpus(config(), policy, tokenizer, [], 0.0)
    asked = everything.texts[3].tolist()
    apart = [samples.request(0, prompt=Array.of(asked[: asked.index(tokenizer.encode("\n")[-1]) + 1]))]
    fewer = bench_kinds.write_corpus(config(), policy, tokenizer, apart, 0.0)
    left = [text.tolist() for text in fewer.texts]
    assert asked not in left
    assert 0 < len(everything.texts) - len(left) == len(everything.documents) - len(fewer.documents)


def test_answers_with_nothing_to_learn_from_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kinds.TextWriter, "write", lambda *_: ([], []))
    with pytest.raises(ConfigError, match="nothing to learn from"):
        bench_kinds.compare_kinds(config(), 1.0)
