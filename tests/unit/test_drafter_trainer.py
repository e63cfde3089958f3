"""The spot trainer: it learns, stops in time, publishes what is better, and goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit import engine_cases
from tests.unit.drafter_cases import DEPTH, one_thread, policy, train_steps, trainer, written  # noqa: F401
from tlt_pipeline.drafter.batching import pack
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.state import StateUnusable, restore, state_path, take_snapshot, write_snapshot
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.drafter.unrolling import unroll
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.models.decoder import CausalAttention, Ops
from tlt_pipeline.models.drafter import drafter_from_policy


def never() -> bool:
    return False


def test_training_raises_agreement_at_every_depth_on_documents_it_never_saw() -> None:
    made = trainer()
    start = made.judge()
    assert start is not None and not start.worth  # nothing learned yet: it is what is published
    train_steps(made, 20)  # of these few documents it soon knows every one by heart
    found = made.judge()
    assert found is not None and found.worth
    assert found.candidate.loss < 0.9 * found.published.loss
    assert found.candidate.cross_entropy < 0.8 * found.published.cross_entropy
    for depth in range(DEPTH):
        assert found.candidate.agreement[depth] > found.published.agreement[depth] + 0.1


def test_the_engine_drafts_as_the_trainer_unrolls() -> None:
    made = trainer()
    train_steps(made, 60)
    assert share_drafted_as_unrolled(made) > 0.8  # there was something to get right


def share_drafted_as_unrolled(made: DrafterTrainer) -> float:
    """Greedy answers, so that each proposal is right or wrong: from the trainer's predictions follows how many drafts
    the engine needed for each answer and how many proposals it accepted, which is checked. An input off by one in
    either shows. (The engine's last draft may reach beyond the answer's end.) -> Accepted proposals a draft."""
    engine = engine_cases.engine(policy(), batch=8, depth=DEPTH)
    engine.set_drafter(made.candidate().drafter, 2)
    requests = [engine_cases.request(number, temperature=0.0) for number in range(0, 48, 3)]
    drafts, accepted = 0, 0
    for request, answer in zip(requests, decode_all(engine, requests), strict=True):
        wanted_drafts, wanted_accepted = follow_drafts(made, request.prompt.tolist(), answer.tokens)
        assert 0 <= answer.draft.drafts - wanted_drafts <= 1
        assert 0 <= answer.draft.accepted - wanted_accepted <= DEPTH
        drafts, accepted = drafts + wanted_drafts, accepted + wanted_accepted
    return accepted / drafts


def follow_drafts(made: DrafterTrainer, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """Drafts and accepted proposals of a chain drafter on this greedy answer, from whole-document predictions."""
    tokens = torch.tensor(prompt + answer)
    with torch.no_grad():
        positions, ops = torch.arange(len(tokens)), Ops(CausalAttention())
        hidden = policy().hidden(tokens[None], positions[None], ops, made.average.taps)[0]
        document = Document(tokens.int(), hidden, torch.ones(len(tokens), dtype=torch.uint8), 0)
        batch, scoring = pack([document], policy().config.hidden_size), made.frozen.of_drafter(made.average)
        predicted = unroll(made.average, made.frozen.embedding, batch, DEPTH)[:, 0]
        proposed = scoring.scores(scoring.norm(predicted)).argmax(-1)
    place, drafts, accepted = len(prompt) - 1, 0, 0
    while place + 2 < len(tokens):  # the newest feature is that of `place`, the newest token the one after it
        right = 0
        while right < DEPTH and place + right + 2 < len(tokens):
            if proposed[right, place + right] != tokens[place + right + 2]:
                break
            right += 1
        drafts, accepted, place = drafts + 1, accepted + right, place + right + 1
    return drafts, accepted


def test_it_stops_between_micro_batches_and_uses_what_they_gave() -> None:
    made = trainer(tokens_per_batch=2048)
    made.seconds_per_token = 1.0  # the smallest micro-batches
    asked = 0

    def after_two() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    before = [parameter.clone() for parameter in made.parameters]
    progress = made.train(60.0, after_two)
    assert progress.steps == 1 and 0 < progress.tokens < 400
    assert made.counts["batch_cut_short"] == 1
    assert any(not torch.equal(old, new) for old, new in zip(before, made.parameters, strict=True))
    assert made.train(60.0, lambda: True).steps == 0


def test_without_data_it_does_nothing_and_says_so() -> None:
    made = trainer(filled=False)
    assert made.train(60.0, never).steps == 0
    assert made.judge() is None
    assert made.counts["no_held_out_data"] == 1


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    made = trainer()
    with torch.no_grad():
        made.frozen.norm.weight[0] = float("nan")
    before = [parameter.clone() for parameter in made.parameters]
    while not made.counts["non_finite_gradient"]:
        made.train(0.01, never)
    assert made.steps == 0
    assert all(torch.equal(old, new) for old, new in zip(before, made.parameters, strict=True))


def test_a_published_candidate_is_the_new_bar() -> None:
    made = trainer()
    train_steps(made, 20)
    candidate = made.candidate()
    assert candidate.parent == 1 and candidate.tokens_trained == made.tokens_trained > 0
    train_steps(made, 5)  # goes on while the version is being written
    made.adopt(2, candidate)
    assert (made.version, made.parent) == (2, 2)
    assert made.tokens_since_parent == made.tokens_trained - candidate.tokens_trained
    judged, start = made.judge(), trainer().judge()
    assert judged is not None and start is not None
    assert judged.published.loss < 0.95 * start.published.loss
    for name, parameter in candidate.drafter.named_parameters():
        assert torch.equal(made.published.get_parameter(name), parameter)
    assert not made.choose_start(made.judge())  # its own line goes on


def test_a_lease_starts_from_the_newest_version_unless_own_work_is_better() -> None:
    other = trainer()
    train_steps(other, 40)
    better, poor = other.candidate().drafter, drafter_from_policy(policy())

    idle = trainer()
    idle.follow(2, better)
    assert idle.choose_start(None) and idle.parent == 2
    assert torch.equal(idle.drafter.fc.weight, better.fc.weight)

    behind = trainer()
    train_steps(behind, 3)
    behind.follow(2, better)
    behind.choose_start(behind.judge())
    assert behind.parent == 2 and behind.tokens_since_parent == 0
    assert torch.equal(behind.average.fc.weight, better.fc.weight)

    ahead = trainer()
    train_steps(ahead, 40)
    ahead.follow(2, poor)
    assert not ahead.choose_start(ahead.judge()) and ahead.tokens_since_parent > 0
    judged = ahead.judge()
    assert judged is not None and judged.candidate.loss < judged.published.loss
    ahead.follow(1, better)  # an older version that was heard late
    assert ahead.version == 2


def test_a_trainer_that_lost_its_way_begins_again_from_the_published_version() -> None:
    made = trainer()
    train_steps(made, 2)
    with torch.no_grad():
        made.average.fc.weight.neg_()
    judged = made.judge()
    assert judged is not None and not judged.worth
    assert made.counts["lost_its_way"] == 1 and made.tokens_since_parent == 0
    for line in (made.drafter, made.average):
        assert torch.equal(line.fc.weight, made.published.fc.weight)


def test_a_new_policy_changes_what_is_judged() -> None:
    made = trainer()
    first = made.judge()
    made.set_policy(FrozenParts.of(policy(seed=1), 1))
    second = made.judge()
    assert first is not None and second is not None
    assert second.published.loss != first.published.loss


def test_state_goes_on_in_another_process(tmp_path: Path) -> None:
    made = trainer()
    train_steps(made, 12)
    path = state_path(tmp_path, 0)
    assert not restore(trainer(), path)
    write_snapshot(take_snapshot(made), path)
    again = trainer()
    assert restore(again, path)
    saved, restored = made.tensors(), again.tensors()
    assert saved.keys() == restored.keys() and any(name.startswith("exp_avg_sq.") for name in saved)
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    assert (again.steps, again.tokens_trained, again.parent) == (12, made.tokens_trained, 1)
    assert not any("embed" in name or "lm_head" in name for name in saved)
    train_steps(again, 1)
    assert list(path.parent.iterdir()) == [path]


def test_state_of_another_model_or_torn_is_refused_and_leaves_the_trainer_alone(tmp_path: Path) -> None:
    made = trainer()
    snapshot = take_snapshot(made)
    path = state_path(tmp_path, 0)
    wrong = {name: tensor[:-1] if tensor.ndim else tensor for name, tensor in snapshot.tensors.items()}
    write_snapshot(type(snapshot)(wrong, snapshot.facts), path)
    before = made.drafter.fc.weight.clone()
    with pytest.raises(StateUnusable, match="remove it"):
        restore(made, path)
    write_snapshot(snapshot, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateUnusable):
        restore(made, path)
    assert torch.equal(made.drafter.fc.weight, before)


def test_the_first_drafter_already_drafts() -> None:
    """Without any data: better than the distribution of a drafter with random weights."""
    made = trainer()
    start = made.judge()
    assert start is not None
    random = trainer(filled=False)
    random.buffer.add(written()[::8], 0, held_out=True)
    random.follow(2, engine_cases.drafter(policy(), seed=3))
    blind = random.judge()
    assert blind is not None
    assert start.published.agreement[0] > 1.5 * blind.published.agreement[0]
