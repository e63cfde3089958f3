"""A drafter that proposes some tokens only: chosen by the answers, kept with its weights, and as lossless as any."""

from __future__ import annotations

import pytest
import torch

from tests.unit import engine_cases
from tests.unit.drafter_cases import DEPTH, document, one_thread, policy, train_steps, trainer, written  # noqa: F401
from tlt_pipeline.drafter.evaluation import evaluate
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.vocabulary import FEWEST, choose_vocabulary, count_tokens, coverage
from tlt_pipeline.engine import engine as engine_module
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.strategies import Fixed, parse_strategy
from tlt_pipeline.models.checkpoint import load_drafter, save_drafter
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.locate import ModelError

V = 5000


def counts_of(**counts: int) -> torch.Tensor:
    made = torch.zeros(V, dtype=torch.int64)
    for name, count in counts.items():
        made[int(name.removeprefix("t"))] = count
    return made


def test_answers_are_counted_and_prompts_are_not() -> None:
    counts = count_tokens([document(6, prompt=4), document(3, first_token=5)], V)
    assert {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()} == {4: 1, 5: 2, 6: 1, 7: 1}


def test_the_most_frequent_tokens_are_chosen_in_ascending_order() -> None:
    chosen = choose_vocabulary(counts_of(t4321=5, t7=1, t1500=2), FEWEST, None)
    assert chosen is not None and len(chosen) == FEWEST
    assert torch.equal(chosen, chosen.unique())
    assert {7, 1500, 4321} <= set(chosen.tolist())
    assert max(set(chosen.tolist()) - {1500, 4321}) == FEWEST - 3  # filled up with the lowest


def test_a_limit_below_what_was_seen_keeps_the_most_frequent() -> None:
    chosen = choose_vocabulary(counts_of(t10=1, t20=3, t30=2), 2, None)
    assert chosen is not None and chosen.tolist() == [20, 30]
    assert coverage(chosen, counts_of(t10=1, t20=3, t30=2)) == pytest.approx(5 / 6)


def test_a_choice_is_kept_while_it_covers_the_answers() -> None:
    first = choose_vocabulary(counts_of(t4000=500), FEWEST, None)
    assert choose_vocabulary(counts_of(t4000=999, t4001=1), FEWEST, first) is first
    moved = choose_vocabulary(counts_of(t4000=900, t4001=100), FEWEST, first)
    assert moved is not None and 4001 in moved.tolist()


def test_a_small_vocabulary_and_no_answers_leave_all_of_it() -> None:
    assert choose_vocabulary(torch.ones(1500, dtype=torch.int64), 32768, None) is None
    assert choose_vocabulary(counts_of(), 32768, None) is None


def narrowed(ids: list[int]):
    drafter = drafter_from_policy(policy())
    drafter.draft_ids = torch.tensor(ids)
    return drafter


@pytest.mark.parametrize("strategy", ["eagle-4", "eagle-3x3x8"])
def test_it_proposes_these_tokens_only_and_changes_no_answer(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [engine_cases.request(number) for number in range(6)]
    expected = [done.tokens for done in decode_all(engine_cases.engine(policy(), batch=6), requests)]
    used = sorted({token for tokens in expected for token in tokens})
    ids = used[::2]
    proposed: set[int] = set()
    verify = engine_module.verify

    def listen(forward, batch, proposals, **options):
        if proposals is not None:
            proposed.update(proposals.tokens_BN.flatten().tolist())
        return verify(forward, batch, proposals, **options)

    monkeypatch.setattr(engine_module, "verify", listen)
    engine = engine_cases.engine(policy(), batch=6)
    engine.set_drafter(narrowed(ids), 1)
    engine.choice = Fixed(parse_strategy(strategy))
    assert [done.tokens for done in decode_all(engine, requests)] == expected
    assert proposed and proposed <= set(ids)


def test_it_is_judged_by_what_the_policy_draws() -> None:
    """All ids: as without a list. Half of them: whatever else the policy draws can't be right."""
    frozen, documents = FrozenParts.of(policy(), 0), list(written()[:8])
    vocab = frozen.head.shape[0]

    def judge(drafter):
        found = evaluate(drafter, frozen, documents, depth=DEPTH, temperature=1.0, tokens_at_once=512)
        assert found is not None
        return found

    whole, listed = judge(drafter_from_policy(policy())), judge(narrowed(list(range(vocab))))
    assert listed.agreement == pytest.approx(whole.agreement)
    assert judge(narrowed(list(range(vocab // 2)))).agreement[0] < whole.agreement[0]


def test_the_trainer_takes_up_the_choice_and_a_folder_keeps_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_pipeline.drafter.vocabulary.FEWEST", 4)
    made = trainer()
    made.config.drafter.__dict__["vocabulary"] = 20
    train_steps(made, 30)
    found = made.judge()
    assert found is not None and found.candidate.loss < found.published.loss
    assert made.covered < 1.0
    candidate = made.candidate().drafter
    assert candidate.draft_ids is not None and len(candidate.draft_ids) == 20
    save_drafter(candidate, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter", policy().config)
    assert loaded.draft_ids is not None and torch.equal(loaded.draft_ids, candidate.draft_ids)


def test_a_list_that_is_no_list_of_tokens_is_refused(tmp_path) -> None:
    for bad in ([3, 2], [5, 10_000_000], [-1, 4]):
        save_drafter(narrowed(bad), tmp_path / "drafter")
        with pytest.raises(ModelError, match="draft_ids must be ascending token ids"):
            load_drafter(tmp_path / "drafter", policy().config)


def test_a_tree_branches_no_more_ways_than_there_are_tokens() -> None:
    requests = [engine_cases.request(number) for number in range(3)]
    expected = [done.tokens for done in decode_all(engine_cases.engine(policy(), batch=3), requests)]
    for ids in ([expected[0][0]], [3, 5]):
        engine = engine_cases.engine(policy(), batch=3)
        engine.set_drafter(narrowed(ids), 1)
        engine.choice = Fixed(parse_strategy("eagle-3x3x8"))
        assert [done.tokens for done in decode_all(engine, requests)] == expected


def test_weights_of_another_shape_are_refused(tmp_path) -> None:
    drafter = drafter_from_policy(policy())
    drafter.fc = torch.nn.Linear(4, 4, bias=False)
    save_drafter(drafter, tmp_path / "drafter")
    with pytest.raises(ModelError, match=r"fc\.weight is \(4, 4\)"):
        load_drafter(tmp_path / "drafter", policy().config)
