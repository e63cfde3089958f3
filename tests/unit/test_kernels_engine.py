"""An engine on Triton kernels, interpreted or on a GPU: they are the path that is taken, the tokens are PyTorch's, and
with the exact layout they don't depend on the batch."""

from __future__ import annotations

from dataclasses import replace

import engine_cases as cases
import pytest
import torch

from tests.unit.kernel_cases import on_every_device
from tlt_kernels import dispatch
from tlt_kernels.dispatch import TAKEN
from tlt_pipeline.engine import invariance
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.engine.graphs import Recorder
from tlt_pipeline.engine.invariance import is_batch_invariant
from tlt_pipeline.engine.layout import TiledLinear, exact_layouts
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.strategies import OFF, Fixed, parse_strategy
from tlt_pipeline.messages import RolloutRequest
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, initialize
from tlt_pipeline.models.drafter import DrafterKind
from tlt_pipeline.models.drafter_config import layer_of
from tlt_pipeline.models.eagle3 import Eagle3Drafter

TREE = "2x2x4"
GREEDY, FILTERED = {"temperature": 0.0}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def policy(dtype: torch.dtype = torch.float32) -> Decoder:
    """As little work for the interpreter as a layer with grouped heads can be."""
    config = DecoderConfig(
        vocab_size=cases.tokenizer().vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        qk_norm=True,
    )
    model = Decoder(config)
    initialize(model, torch.Generator().manual_seed(0), std=0.2)
    return model.to(dtype)


def requests(count: int = 2, **sampling: object) -> list[RolloutRequest]:
    """Of two prompts, and of different lengths."""
    return [cases.request(3 * number, **{"max_new_tokens": 4 + 5 * number, **sampling}) for number in range(count)]


def engine_for(
    strategy: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    exact: str = "off",
    kind: DrafterKind = "eagle",
) -> Engine:
    """With a drafter that proposes some of the tokens only, if it can choose."""
    model = policy(dtype)
    drafter = cases.drafter(model, kind=kind)  # fitted before either moves, so that it is the same everywhere
    if not drafter.owns_head:
        drafter.draft_ids = torch.arange(2, model.config.vocab_size)[torch.arange(model.config.vocab_size - 2) % 5 > 0]
    engine = cases.engine(model.to(device), batch=batch, exact=exact, trees=(TREE,))
    engine.set_drafter(drafter.to(device), 1)
    engine.choice = Fixed(parse_strategy(strategy))
    return engine


def tokens_of(finished: list[Finished]) -> list[list[int]]:
    return [done.tokens for done in finished]


def expected_kernels(strategy: str, proposed: int, accepted: int) -> set[str]:
    """What a run of that strategy calls."""
    found = {"attention", "sampling_draw"}
    if proposed:
        found.add("tree_accept")
    if strategy.startswith("eagle"):
        found.add("draft_topk")
    return found | ({"kv_compact"} if "x" in strategy and accepted else set())


@on_every_device
@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        ("off", {}),
        ("off", FILTERED),
        ("ngram-2", GREEDY),
        ("eagle-2", {}),
        ("eagle-2", FILTERED),
        (f"eagle-{TREE}", {}),
        (f"eagle-{TREE}", GREEDY),
    ],
)
def test_kernels_are_taken_and_write_the_same_tokens(device: str, strategy: str, sampling: dict[str, object]):
    expected = decode_all(engine_for(strategy), requests(**sampling))
    before = TAKEN.copy()
    with dispatch.interpreted():
        finished = decode_all(engine_for(strategy, device), requests(**sampling))
    taken = TAKEN - before
    assert tokens_of(finished) == tokens_of(expected)
    assert {path for _, path in taken} == {"triton"}, "nothing fell back"
    proposed, accepted = (sum(getattr(done.draft, part) for done in finished) for part in ("drafted", "accepted"))
    assert {kernel for kernel, _ in taken} == expected_kernels(strategy, proposed, accepted)
    for one, other in zip(finished, expected, strict=True):
        assert one.draft == other.draft, "the drafter proposed the same"
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
    assert accepted or strategy == "off" or sampling != GREEDY


@on_every_device
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*((strategy, "eagle") for strategy in ("off", "ngram-2", "eagle-2", f"eagle-{TREE}")), ("eagle-2", "eagle3")],
)
def test_captured_passes_write_the_same_tokens(device: str, strategy: str, kind: DrafterKind):
    """As CUDA graphs, or with a recorder that runs the work again on the graphs' own buffers, which is all but CUDA's
    part of it. The drafter is swapped in mid-answer, and the batch shrinks."""

    def decode(device: str, recorder: Recorder | None) -> tuple[Engine, list[Finished]]:
        engine, finished = engine_for(strategy, device, kind=kind), []
        engine.strategies, engine.recorder = (OFF, parse_strategy(strategy)), recorder
        drafters = [cases.drafter(policy(), seed, kind).to(device) for seed in (5, None)]
        for request in requests(**GREEDY):
            engine.submit(request)
        while engine.running or engine.waiting:
            finished += engine.step()
            engine.set_drafter(drafters[engine.drafter_version % 2], engine.drafter_version + 1)
        return engine, sorted(finished, key=lambda done: done.request.request_id)

    _, expected = decode("cpu", None)
    with dispatch.interpreted():
        engine, finished = decode(device, (lambda work: work) if device == "cpu" else None)
    assert tokens_of(finished) == tokens_of(expected)
    assert [done.draft for done in finished] == [done.draft for done in expected], "the drafter proposed the same"
    assert engine.passes is not None
    graphs = engine.passes.graphs
    assert {key.batch for key in graphs.replayed if key.stage == "verify"} == {1, 2}
    assert ("draft" in {key.stage for key in graphs.replayed}) == strategy.startswith("eagle")
    # a drafter catches up with a prompt, and an n-gram match is short, in passes of other shapes
    assert set(graphs.eager) <= {"not_planned"}
    assert sum(graphs.replayed.values()) > 3 * sum(graphs.eager.values())


@on_every_device
def test_a_drafter_of_other_dimensions_is_captured_too(device: str):
    """One that was trained elsewhere (its layer needn't be like the policy's), and one unlike it: that one isn't."""
    config = policy().config
    taps = cases.drafter(policy(), kind="eagle3").taps
    layer = replace(layer_of(config), intermediate_size=40, num_heads=2, num_kv_heads=2, head_dim=8)

    def decode(device: str, recorder: Recorder | None, mixed: bool) -> tuple[Engine, list[Finished]]:
        engine, finished = engine_for("eagle-2", device, kind="eagle3"), []
        engine.strategies, engine.recorder = (OFF, parse_strategy("eagle-2")), recorder
        other = replace(layer, rope_theta=77.0) if mixed else layer
        drafters = [Eagle3Drafter(config, taps, config.vocab_size, each, True) for each in (layer, other)]
        for seed, each in enumerate(drafters):
            initialize(each, torch.Generator().manual_seed(seed), std=0.1)
        engine.set_drafter(drafters[0].to(device), 1)
        for request in requests(**GREEDY):
            engine.submit(request)
        while engine.running or engine.waiting:
            finished += engine.step()
            engine.set_drafter(drafters[engine.drafter_version % 2].to(device), engine.drafter_version + 1)
        return engine, sorted(finished, key=lambda done: done.request.request_id)

    for mixed in (False, True):
        _, expected = decode("cpu", None, mixed)
        with dispatch.interpreted():
            engine, finished = decode(device, (lambda work: work) if device == "cpu" else None, mixed)
        assert tokens_of(finished) == tokens_of(expected)
        assert [done.draft for done in finished] == [done.draft for done in expected], "the drafter proposed the same"
        assert engine.passes is not None
        assert "draft" in {key.stage for key in engine.passes.graphs.replayed}


@on_every_device
@both_dtypes
def test_the_exact_layout_passes_the_start_up_check(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    for name, few in {"WORK": 0, "FEWEST_COUNTS": 3, "MOST_ROWS": 36, "MOST_READ": 3}.items():  # interpreting is slow
        monkeypatch.setattr(invariance, name, few)
    model = policy(dtype).to(device)
    with dispatch.interpreted():
        layout = exact_layouts(model)[0]
        assert isinstance(layout.linear, TiledLinear)
        assert is_batch_invariant(Forward(model, layout), length=3)


@on_every_device
@both_dtypes
def test_the_exact_layout_changes_no_bit(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Every strategy in a batch writes what decoding one by one writes."""
    monkeypatch.setattr(invariance, "is_batch_invariant", lambda *_: True)  # as the test above found out
    with dispatch.interpreted():
        expected = decode_all(engine_for("off", device, dtype, batch=1, exact="on"), requests())
        for strategy in ("off", "eagle-2", f"eagle-{TREE}"):
            before = TAKEN.copy()
            engine = engine_for(strategy, device, dtype, exact="on")
            finished = decode_all(engine, requests())
            assert engine.claim == "exact" and ("matmul", "triton") in TAKEN - before
            for one, other in zip(finished, expected, strict=True):
                assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
            assert strategy == "off" or sum(done.draft.accepted for done in finished) > 0
