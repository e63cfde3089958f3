"""Completions as the trainer sees them: answers with an advantage, in minibatches of whole groups.

Everything here is ordered by request id, so that the order in which completions arrived changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from tlt_pipeline.learner.advantages import assign_advantages
from tlt_pipeline.learner.batching import Example, MicroBatch
from tlt_pipeline.learner.losses import TokenData
from tlt_pipeline.messages import Completion


class BadCompletion(ValueError):
    """A completion that can't be trained on; the text names it."""


@dataclass
class Answer:
    """One answer. All tensors [answer tokens], float32, on the CPU. `sampled`: log-probabilities under the
    distribution that the tokens were drawn from; `rollout`: under the whole one at that temperature. `old`
    and `reference` are filled in before the first update where they are needed; `own`: the old policy is the
    one that the update's own forward pass computes."""

    request_id: str
    group_id: str
    example: Example
    advantage: float
    staleness: int
    sampled: Tensor
    rollout: Tensor
    own: bool = True
    old: Tensor | None = None
    reference: Tensor | None = None


def prepare_answers(completions: Sequence[Completion], normalize_std: bool, version: int) -> tuple[list[Answer], int]:
    """Answers of groups that teach something, and the number of groups that don't.

    Raises BadCompletion: a request twice, no tokens, arrays of different length, a reward that is no
    number."""
    ordered = sorted(completions, key=lambda completion: completion.request_id)
    for before, after in pairwise(ordered):
        if before.request_id == after.request_id:
            raise BadCompletion(f"{after.request_id} is there twice")
    for completion in ordered:
        _check(completion)
    rewards = {completion.request_id: completion.reward for completion in ordered}
    groups = {completion.request_id: completion.group_id for completion in ordered}
    advantages, left_out = assign_advantages(rewards, groups, normalize_std)
    chosen = [completion for completion in ordered if completion.request_id in advantages]
    answers = [_answer(completion, advantages[completion.request_id], version) for completion in chosen]
    return answers, left_out


def split_minibatches(answers: Sequence[Answer], count: int, seed: str) -> list[list[Answer]]:
    """`count` minibatches of whole groups (fewer where there are fewer groups), by a shuffle that `seed`
    decides."""
    groups = sorted({answer.group_id for answer in answers})
    Random(seed).shuffle(groups)
    count = min(count, len(groups))
    place = {group: number * count // len(groups) for number, group in enumerate(groups)}
    return [[answer for answer in answers if place[answer.group_id] == part] for part in range(count)]


def token_data(answers: Sequence[Answer], batch: MicroBatch, weights: Sequence[float]) -> TokenData:
    """The micro-batch's answers (`batch.indices`, into `answers`), token by token, on its device. `weights`:
    of a token of each answer in `answers`."""
    rows = [answers[index] for index in batch.indices]
    lengths = torch.tensor([row.example.answer for row in rows])

    def spread(values: list[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), lengths).to(batch.tokens_BT.device)

    def join(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors).to(batch.tokens_BT.device)

    known = [row.reference for row in rows if row.reference is not None]
    return TokenData(
        old_A=join([row.rollout if row.old is None else row.old for row in rows]),
        own_A=spread([float(row.own) for row in rows]).bool(),
        sampled_A=join([row.sampled for row in rows]),
        advantages_A=spread([row.advantage for row in rows]),
        weights_A=spread([weights[index] for index in batch.indices]),
        reference_A=join(known) if known else None,
    )


def _check(completion: Completion) -> None:
    count = completion.tokens.length
    if count == 0 or completion.prompt.length == 0:
        raise BadCompletion(f"{completion.request_id} has no tokens: prompt and answer need one at least")
    if completion.logprobs.length != count or completion.policy_logprobs.length != count:
        raise BadCompletion(f"{completion.request_id} has {count} tokens but another number of logprobs")
    if not math.isfinite(completion.reward):
        raise BadCompletion(f"the reward of {completion.request_id} is {completion.reward}: see the verifier")


def _answer(completion: Completion, advantage: float, version: int) -> Answer:
    prompt, tokens = completion.prompt.tolist(), completion.tokens.tolist()
    return Answer(
        request_id=completion.request_id,
        group_id=completion.group_id,
        example=Example((*prompt, *tokens), len(prompt)),
        advantage=advantage,
        staleness=version - completion.policy_version,
        sampled=torch.tensor(completion.logprobs.tolist(), dtype=torch.float32),
        rollout=torch.tensor(completion.policy_logprobs.tolist(), dtype=torch.float32),
    )
