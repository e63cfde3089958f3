"""Micro-batches and the scoring of answers."""

from __future__ import annotations

import pytest
import torch
from learner_cases import CONFIG, make_policy

from tlt_pipeline.learner import scoring as scoring_module
from tlt_pipeline.learner.batching import Example, bucket, collate
from tlt_pipeline.learner.scoring import Scoring, backpropagate, score_answers

CPU = torch.device("cpu")


def examples(count: int = 7, seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 30, (), generator=generator))
        tokens = torch.randint(1, CONFIG.vocab_size, (length,), generator=generator).tolist()
        found.append(Example(tuple(tokens), 1 + length // 3))
    return found


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
def test_bucket_takes_each_once_within_the_budget(budget) -> None:
    lengths = [5, 30, 7, 7, 31, 2, 50, 7]
    batches = bucket(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget
    assert bucket(lengths, budget) == batches


def test_long_tail_is_not_padded_away() -> None:
    lengths = [400, *[20] * 100]
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in bucket(lengths, 8192))
    assert padded <= 1.6 * sum(lengths)


def test_example_needs_prompt_and_answer() -> None:
    with pytest.raises(ValueError, match="both hold tokens"):
        Example((1, 2), 2)


def test_scores_equal_a_forward_pass_without_padding() -> None:
    model, chosen = make_policy(), examples()
    batch = collate(chosen, range(len(chosen)), CPU)
    scored = score_answers(model, batch, Scoring(CPU, temperature=0.7, entropy="value"))
    logprobs, entropy = [], []
    for example in chosen:
        all_TV = torch.log_softmax(model(torch.tensor([example.tokens]))[0] / 0.7, -1).detach()
        for place in range(example.prompt, len(example.tokens)):
            logprobs.append(all_TV[place - 1, example.tokens[place]])
            entropy.append(-(all_TV[place - 1].exp() * all_TV[place - 1]).sum())
    torch.testing.assert_close(scored.logprobs_A, torch.stack(logprobs), atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.entropy_A, torch.stack(entropy), atol=1e-5, rtol=0)


def test_chunks_change_neither_loss_nor_gradient(monkeypatch) -> None:
    chosen = examples()
    found = []
    for scores in (1 << 24, CONFIG.vocab_size * 5):
        monkeypatch.setattr(scoring_module, "CHUNK_SCORES", scores)
        model = make_policy()
        batch = collate(chosen, range(len(chosen)), CPU)
        loss, _ = backpropagate(model, batch, Scoring(CPU), lambda scored, _rows: -scored.logprobs_A.sum())
        found.append((loss, {name: value.grad for name, value in model.named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=2e-5, rtol=1e-5)


def test_bfloat16_is_close_to_float32() -> None:
    model, chosen = make_policy(), examples()
    batch = collate(chosen, range(len(chosen)), CPU)
    exact = score_answers(model, batch, Scoring(CPU)).logprobs_A
    fast = score_answers(model, batch, Scoring(CPU, autocast=True)).logprobs_A
    assert fast.dtype == torch.float32
    assert not torch.equal(exact, fast)
    torch.testing.assert_close(fast, exact, atol=0.3, rtol=0.05)
