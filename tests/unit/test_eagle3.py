"""The EAGLE-3 drafter: as lossless as any, trained as it drafts, and its own norm, head and tokens go with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.unit import engine_cases as cases
from tests.unit.drafter_cases import DEPTH, config, one_thread, policy, train_steps, trainer, written  # noqa: F401
from tests.unit.test_drafter_trainer import share_drafted_as_unrolled
from tests.unit.test_engine_exactness import DTYPES, REQUESTS, alone, answers, reference
from tlt_pipeline.config import validate_config
from tlt_pipeline.drafter import losses
from tlt_pipeline.drafter.batching import pack
from tlt_pipeline.drafter.initial import feature_taps, fit_initial, load_initial
from tlt_pipeline.drafter.losses import FrozenParts, own_head_cross_entropy
from tlt_pipeline.drafter.recomputing import recompute
from tlt_pipeline.drafter.state import restore, state_path, take_snapshot, write_snapshot
from tlt_pipeline.drafter.unrolling import unroll
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.strategies import Fixed, parse_strategy
from tlt_pipeline.models.checkpoint import load_drafter, save_drafter
from tlt_pipeline.models.decoder import CausalAttention, Ops
from tlt_pipeline.models.drafter_config import read_taps
from tlt_pipeline.models.eagle3 import Eagle3Drafter, default_taps
from tlt_pipeline.models.eagle3_start import eagle3_from_policy
from tlt_pipeline.models.locate import ModelError

SIZE = 64


def test_taps_are_those_of_vllm_and_differ_where_they_can() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(8) == (2, 4, 5)
    assert [default_taps(layers) for layers in (6, 4, 2, 1)] == [(2, 3, 4), (1, 2, 3), (0, 0, 1), (0, 0, 0)]
    assert all(0 <= tap < layers for layers in range(1, 40) for tap in default_taps(layers))


def test_tapped_features_are_the_layers_inputs_and_the_last_state() -> None:
    model, tokens = policy(), torch.arange(2, 12)[None]
    positions, ops = torch.arange(10)[None], Ops(CausalAttention())
    with torch.no_grad():
        tapped = model.hidden(tokens, positions, ops, (0, 1))
        last = model.hidden(tokens, positions, ops)
        cos, sin = model.rope.gather(positions, torch.float32)
        first = model.layers[0](model.embed(tokens), cos, sin, 0, ops)
    assert torch.equal(tapped[..., :SIZE], model.embed(tokens))
    assert torch.equal(tapped[..., SIZE : 2 * SIZE], first)
    assert torch.equal(tapped[..., 2 * SIZE :], last)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(("llama", dtype) for dtype in DTYPES), ("qwen2", torch.bfloat16), ("qwen3", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["eagle-4", "eagle-3x3x8", "mixed"])
def test_it_changes_no_bit(strategy, family, dtype) -> None:
    model = cases.policy(family, dtype)
    engine = cases.engine(model, batch=5)
    engine.set_drafter(cases.drafter(model, kind="eagle3"), 1)
    engine.choice = cases.Shuffled(seed=3) if strategy == "mixed" else Fixed(parse_strategy(strategy))
    finished = decode_all(engine, REQUESTS)
    assert engine.claim == "exact"
    assert answers(finished) == reference(family, dtype)
    assert sum(done.draft.accepted for done in finished) > 0, "proposals were accepted, or this showed nothing"


def test_a_short_memory_a_narrow_head_and_swapped_versions_change_no_bit() -> None:
    model = cases.policy()
    expected = alone(model)
    ids = torch.arange(0, model.config.vocab_size, 2)
    drafters = [
        cases.drafter(model, kind="eagle3"),
        cases.drafter(model, 5, "eagle3"),
        eagle3_from_policy(model, (), ids),
    ]
    for window in (7, 1024):
        engine = cases.engine(model, batch=4, context_window=window)
        engine.choice = cases.Shuffled(seed=window)
        finished, pending, step = [], list(REQUESTS), 0
        while pending or engine.running:
            engine.set_drafter(drafters[step % 3], step + 1)
            while pending and engine.room:
                engine.submit(pending.pop())
            finished += engine.step()
            step += 1
        assert answers(finished) == expected


def test_the_kind_changes_between_answers_only() -> None:
    model = cases.policy()
    engine = cases.engine(model)
    engine.set_drafter(cases.drafter(model), 1)
    first = answers(decode_all(engine, REQUESTS[:3]))
    engine.set_drafter(cases.drafter(model, kind="eagle3"), 2)
    engine.submit(REQUESTS[0])
    engine.step()
    with pytest.raises(ValueError, match="drafters of one kind"):
        engine.set_drafter(cases.drafter(model), 3)
    engine.abandon()
    engine.set_drafter(cases.drafter(model), 4)
    assert answers(decode_all(engine, REQUESTS[:3])) == first


def test_streamed_and_recomputed_features_are_alike() -> None:
    document = max(written(kind="eagle3"), key=lambda each: each.position == 0 and len(each))
    taps = default_taps(policy().config.num_layers)
    bare = replace(document, hidden=document.hidden[:, :0])
    found = recompute(policy(), [bare], tokens_at_once=256, tokens_per_answer=0, taps=taps)
    assert found is not None and document.hidden.shape[1] == 4 * SIZE
    torch.testing.assert_close(found[0].hidden, document.hidden, atol=0.05, rtol=0.05)


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_raises_acceptance_at_every_depth() -> None:
    made = trainer(kind="eagle3")
    train_steps(made, 30)
    found = made.judge()
    assert found is not None and found.worth
    assert found.candidate.acceptance_length > 1.1 * found.published.acceptance_length
    for depth in range(DEPTH):
        assert found.candidate.agreement[depth] > found.published.agreement[depth] + 0.05


def test_the_engine_drafts_as_the_trainer_unrolls() -> None:
    made = trainer(kind="eagle3")
    train_steps(made, 60)
    assert share_drafted_as_unrolled(made) > 0.4  # there was something to get right


@pytest.mark.parametrize("elements", [1 << 22, 300], ids=["one chunk", "many chunks"])
def test_the_loss_and_all_its_gradients(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Against the plain definition: over the draft vocabulary, of every unrolled step."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", elements)
    ids = torch.arange(1, policy().config.vocab_size, 3)
    drafter = eagle3_from_policy(policy(), (), ids)
    frozen = FrozenParts.of(policy(), 0)
    batch = pack([each for each in written(kind="eagle3") if len(each) > 4][:4], SIZE)
    targets = batch.targets_RWC.flatten(0, 1)
    weight = torch.rand(3, len(targets), generator=torch.Generator().manual_seed(0))
    predicted = unroll(drafter, frozen.embedding, batch, 3).flatten(1, 2)
    parameters = list(drafter.parameters())
    narrow = frozen.narrowed(drafter)
    loss = own_head_cross_entropy(drafter, predicted, targets, weight, narrow)
    found = torch.autograd.grad(2 * loss, parameters, retain_graph=True)
    likely = policy().logits(targets)[:, ids].softmax(-1).detach()
    scores = F.linear(drafter.own_norm(predicted), drafter.own_head.weight)
    plain = (-(likely * scores.log_softmax(-1)).sum(-1) * weight).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-4)
    for one, other in zip(found, torch.autograd.grad(2 * plain, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_an_eagle_drafter_can_be_unrolled_in_training_too() -> None:
    made = trainer(unroll_steps=2)
    train_steps(made, 20)
    found = made.judge()
    assert found is not None and found.candidate.agreement[1] > found.published.agreement[1] + 0.1


def test_its_tokens_stay_and_its_state_goes_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(kind="eagle3")
    train_steps(made, 3)
    assert made.drafter.draft_ids is None and made.covered == 1.0
    path = state_path(tmp_path, 0)
    write_snapshot(take_snapshot(made), path)
    again = trainer(kind="eagle3")
    assert restore(again, path)
    assert torch.equal(again.average.get_parameter("own_head.weight"), made.average.get_parameter("own_head.weight"))
    train_steps(again, 1)


# --- folders and settings ---------------------------------------------------------------------------------------------


def narrowed() -> Eagle3Drafter:
    return eagle3_from_policy(policy(), (), torch.tensor([2, 3, 7, 11]))


def test_a_folder_keeps_taps_tokens_norm_and_head(tmp_path) -> None:
    made = narrowed()
    with torch.no_grad():
        made.own_norm.weight.mul_(1.5)
    save_drafter(made, tmp_path)
    loaded = load_drafter(tmp_path, policy().config)
    assert isinstance(loaded, Eagle3Drafter) and loaded.taps == made.taps == read_taps(tmp_path, 2) == (0, 0, 1)
    assert load_drafter(tmp_path, loaded.policy_config).taps == made.taps  # what a trainer knows of the policy
    assert loaded.draft_ids is not None and loaded.draft_ids.tolist() == [2, 3, 7, 11]
    for name, parameter in made.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"taps": [0, 1, 9]}, "layers of the policy, below 2"),
        ({"taps": [0, 1]}, "fc.weight is"),
        ({"draft_vocab_size": 5}, "5 rows for 4 tokens"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be"),
        ({"model_type": "tlt_eagle9"}, "holds no drafter"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(tmp_path, change, reason) -> None:
    save_drafter(narrowed(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=reason):
        load_drafter(tmp_path, policy().config)


def test_a_head_without_its_tokens_is_refused(tmp_path) -> None:
    made = narrowed()
    made.draft_ids = None
    save_drafter(made, tmp_path)
    with pytest.raises(ModelError, match="4 rows for"):
        load_drafter(tmp_path, policy().config)


def settings(**drafter):
    return validate_config(config().model_dump() | {"drafter": drafter})


def test_the_config_says_which_kind_a_run_begins_with(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_pipeline.drafter.initial.OWN_HEAD_FEWEST", 4)
    model = policy()
    wanted = settings(kind="eagle3", vocabulary=12)
    texts = [torch.randint(2, 14, (40,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    made = fit_initial(wanted, model, texts)
    assert made.kind == "eagle3" and made.draft_ids is not None and made.draft_ids.tolist() == list(range(2, 14))
    assert feature_taps(wanted, model.config) == made.taps
    assert feature_taps(settings(), model.config) == ()
    save_drafter(made, tmp_path)
    begun = settings(kind="eagle3", init=str(tmp_path))
    assert load_initial(begun, tmp_path, model.config).taps == feature_taps(begun, model.config)
    with pytest.raises(ModelError, match=r"set drafter\.kind=eagle3"):
        load_initial(settings(), tmp_path, model.config)
