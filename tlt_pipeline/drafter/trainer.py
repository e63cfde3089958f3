"""The spot trainer: one slot's drafter, its data, and the decision whether it is worth publishing.

It trains for as long as it is let, batch by batch, and can be stopped between two micro-batches; the gradient of
those done by then is still used. What is judged and published is a moving average of the weights: with a constant
learning rate it is ahead of the newest ones at no cost (measured on a 1.3 M-parameter policy: acceptance length
4.36 -> 4.40 after 8 s). One thread at a time.

EAGLE's drafter isn't trained on its own outputs (unrolling.py) unless the config says so: it costs its share of steps,
and with the feature loss weighted as it is, plain steps reached more at every depth from 1 to 4 in the same CPU time
(acceptance length 4.36 against 4.22 with two unrolled steps and 4.02 with three). EAGLE-3's drafter, which has no
feature loss, is trained on them.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_pipeline.config import RunConfig
from tlt_pipeline.drafter.batching import pack, split_documents
from tlt_pipeline.drafter.buffer import DocumentBuffer
from tlt_pipeline.drafter.evaluation import HeldOut, evaluate
from tlt_pipeline.drafter.judging import Candidate, Judge, Judgement
from tlt_pipeline.drafter.losses import STEP_DECAY, FrozenParts, drafter_loss
from tlt_pipeline.drafter.merging import Lineage, Work
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.unrolling import step_weights, unroll
from tlt_pipeline.drafter.vocabulary import choose_vocabulary, count_tokens, coverage
from tlt_pipeline.models.drafter import Drafter

BETAS = (0.9, 0.95)
AVERAGE = 0.98
"""Share that the moving average keeps at a step; less at the beginning of a drafter that was never trained. One that
was is a better beginning than the first steps' weights: 12,000 tokens on, the quickstart's was at 3.52, else 3.39."""
HELD_OUT_BATCHES = 6
"""A judgement looks at so many batches of held-out tokens."""
LOST = 0.02
"""A held-out loss above the published version's by this share isn't a step's noise."""
FEWEST_TOKENS = 64
FIRST_SPEED = 2e10
"""FLOP/s assumed before the first micro-batch was timed: low, so that it ends in time."""
UNROLLED = {"eagle": 1, "eagle3": 3}
"""Steps in training, by kind of drafter, where the config leaves it open. EAGLE-3 after 60 s on the quickstart's
policy: acceptance length 2.23 with one (nothing holds beyond the first position), 4.22 with three, 3.50 with five."""


@dataclass(frozen=True)
class Progress:
    """What one call of `train` did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0


class DrafterTrainer:
    """`published`, `version`: the newest published drafter known. `parent`: the version that training started from.
    `counts`: what was skipped, by reason. `covered`: share of the answers' tokens that the drafter may propose.
    `trained`: the drafter was, before."""

    def __init__(
        self,
        config: RunConfig,
        drafter: Drafter,
        version: int,
        frozen: FrozenParts,
        slot: int,
        *,
        trained: bool = False,
    ) -> None:
        self.settings, self.config = config.drafter.train, config
        self.frozen = frozen
        self.device = frozen.embedding.device
        self.drafter = copy.deepcopy(drafter).to(self.device, torch.float32).requires_grad_(True)
        self.average = copy.deepcopy(self.drafter).requires_grad_(False)
        self.published = copy.deepcopy(self.average)
        self.version = self.parent = version
        self._trained = trained
        self.unroll_steps = self.settings.unroll_steps or UNROLLED[drafter.kind]
        self.parameters = list(self.drafter.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.settings.lr, betas=BETAS, weight_decay=self.settings.weight_decay, fused=True
        )
        self.buffer = DocumentBuffer(
            keep_steps=self.settings.keep_steps,
            byte_limit=config.hidden_states.bytes_quota,
            held_out_share=config.held_out_share,
            seed=config.seed + slot,
        )
        self._narrow = frozen.narrowed(self.drafter)
        self.covered = 1.0
        self._vocabulary_of: tuple[int, int, int] | None = None
        self.steps = self.tokens_trained = self.tokens_since_parent = 0
        self.counts: Counter[str] = Counter()
        self.seconds_per_token = self._guess_speed()
        self.line = 0
        """Grows when training begins again from a published version."""
        self._judge = Judge(self.settings.min_gain, self.counts)

    # --- what the others publish ----------------------------------------------------------------------------------

    def set_policy(self, frozen: FrozenParts) -> None:
        """A new policy: its norm, head and embedding are what the drafter is used with from now on."""
        self.frozen = frozen
        self._narrow = frozen.narrowed(self.drafter)

    def _choose_vocabulary(self) -> None:
        """The tokens that may be proposed, by the answers in the buffer. A head of the drafter's own has them fixed."""
        known = len(self.buffer), self.buffer.newest_version, self.version
        if known == self._vocabulary_of:
            return
        self._vocabulary_of = known
        counts_V = count_tokens(self.buffer.documents, self.frozen.embedding.shape[0])
        chosen_v = self.drafter.draft_ids
        if not self.drafter.owns_head:
            chosen_v = choose_vocabulary(counts_V, self.config.drafter.vocabulary, chosen_v)
            self.drafter.draft_ids = self.average.draft_ids = None if chosen_v is None else chosen_v.to(self.device)
        self.covered = coverage(chosen_v, counts_V)
        self._narrow = self.frozen.narrowed(self.drafter)

    def follow(self, version: int, drafter: Drafter) -> None:
        """A newer version was published, here or elsewhere: it is what a candidate has to beat."""
        if version <= self.version:
            return
        _copy(drafter, self.published)
        self.version = version

    def choose_start(self, judgement: Judgement | None) -> bool:
        """At the start of a lease: goes on from the newest published version, unless what was learned on top of an
        older one is better by `judgement` (None: not known). True: the published one was taken."""
        if self.parent == self.version:
            return False
        if self.tokens_since_parent and judgement is not None and judgement.own.loss < judgement.published.loss:
            return False
        self.restart_from_published()
        return True

    def restart_from_published(self) -> None:
        _copy(self.published, self.drafter)
        _copy(self.published, self.average)
        self._narrow, self._vocabulary_of = self.frozen.narrowed(self.drafter), None
        self.parent = self.version
        self.tokens_since_parent = 0
        self.line += 1

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, seconds: float, should_stop: Callable[[], bool]) -> Progress:
        """Optimizer steps for about `seconds`, until stopped or there is no data."""
        began = time.monotonic()
        self._choose_vocabulary()
        done = Progress()
        while time.monotonic() - began < seconds and not should_stop():
            documents = self.buffer.draw(self.settings.tokens_per_batch)
            if not documents:
                break
            tokens, loss = self._learn(documents, should_stop)
            done = Progress(done.steps + 1, done.tokens + tokens, loss=loss)
        return Progress(done.steps, done.tokens, time.monotonic() - began, done.loss)

    def _learn(self, documents: list[Document], should_stop: Callable[[], bool]) -> tuple[int, float]:
        """One optimizer step -> tokens it used, mean loss."""
        tokens, total, weight = 0, 0.0, 0.0
        for group in split_documents(documents, self.tokens_at_once):
            if tokens and should_stop():
                self.counts["batch_cut_short"] += 1
                break
            loss, group_weight = self._accumulate(group)
            total, weight, tokens = total + loss, weight + group_weight, tokens + sum(map(len, group))
        self._step(weight)
        self.tokens_trained += tokens
        self.tokens_since_parent += tokens
        return tokens, total / max(weight, 1.0)

    def _accumulate(self, documents: list[Document]) -> tuple[float, float]:
        """Adds one micro-batch's gradient of the *summed* loss -> that loss, and its weight."""
        began = time.monotonic()
        batch = pack(documents, self.drafter.config.hidden_size).to(self.device)
        steps = self.unroll_steps
        predicted_SNC = unroll(self.drafter, self.frozen.embedding, batch, steps).flatten(1, 2)
        decay_S1 = STEP_DECAY ** torch.arange(steps, device=self.device).unsqueeze(1)
        weight_SN = step_weights(batch, steps).flatten(1) * decay_S1
        targets_NC = batch.targets_RWC.flatten(0, 1)
        loss = drafter_loss(self.drafter, predicted_SNC, targets_NC, weight_SN, self._narrow, self.settings)
        loss.backward()
        result = loss.item(), weight_SN.sum().item()
        took = (time.monotonic() - began) / sum(map(len, documents))
        # the slowest counts at once, a faster one bit by bit: a micro-batch must not outlast the deadline
        self.seconds_per_token = max(took, 0.8 * self.seconds_per_token + 0.2 * took)
        return result

    def _step(self, weight: float) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_div_(gradients, max(weight, 1.0))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        if torch.isfinite(norm):
            self.optimizer.step()
            self.steps += 1
            self._move_average()
        else:
            self.counts["non_finite_gradient"] += 1
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _move_average(self) -> None:
        keep = AVERAGE if self._trained else min(AVERAGE, self.steps / (self.steps + 9))
        torch._foreach_lerp_(list(self.average.parameters()), self.parameters, 1.0 - keep)

    @property
    def tokens_at_once(self) -> int:
        """Micro-batch size: a quarter of the deadline at the speed measured."""
        fitting = int(0.25 * self.config.slots.preempt_deadline_s / self.seconds_per_token)
        return max(FEWEST_TOKENS, min(fitting, self.settings.tokens_per_batch))

    def _guess_speed(self) -> float:
        size = sum(parameter.numel() for parameter in self.parameters) + 2 * self._narrow.head.numel()
        return 6 * size * self.unroll_steps / FIRST_SPEED

    # --- judging --------------------------------------------------------------------------------------------------

    def judge(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        others: Sequence[Work] = (),
        lineage: Lineage | None = None,
    ) -> Judgement | None:
        """Compares what was learned, here and in `others`, with the published version. None: stopped, or no held-out
        data yet (counted). Clearly worse (few data seen too often; another slot was quicker): training begins again
        from the published one."""
        documents = self.buffer.held_out(HELD_OUT_BATCHES * self.settings.tokens_per_batch)
        if not documents:
            self.counts["no_held_out_data"] += 1
            return None
        judgement = self._judge.compare(
            Work(self.average, self.parent, self.tokens_since_parent),
            Work(self.published, self.version, 0),
            others,
            lineage or Lineage(),
            evaluate=lambda drafter: self._evaluate(drafter, documents, should_stop),
            key=(self.version, self.frozen.policy_version, self.buffer.held_out_changes),
        )
        if judgement is not None and judgement.own.loss > judgement.published.loss * (1.0 + LOST):
            self.counts["lost_its_way"] += 1
            self.restart_from_published()
        return judgement

    def _evaluate(self, drafter: Drafter, documents: list[Document], should_stop: Callable[[], bool]) -> HeldOut | None:
        return evaluate(
            drafter,
            self.frozen,
            documents,
            depth=self.config.engine.speculation.depth,
            temperature=self.config.rollout.temperature,
            tokens_at_once=self.tokens_at_once,
            should_stop=should_stop,
        )

    def candidate(self, judgement: Judgement | None = None) -> Candidate:
        """A copy of what `judge` found best (None: the trainer's own), for publishing while training goes on."""
        own = copy.deepcopy(self.average)
        work = (judgement and judgement.better) or Work(own, self.parent, self.tokens_since_parent)
        policy_version = self.frozen.policy_version
        return Candidate(
            work.drafter, work.parent, policy_version, work.tokens, own, self.tokens_since_parent, self.line
        )

    def adopt(self, version: int, candidate: Candidate) -> None:
        """The candidate was published as `version`: training goes on from where it is, moved by what the published one
        has in addition to the trainer's own."""
        self.follow(version, candidate.drafter)
        if candidate.line != self.line:
            return
        self._move(candidate.own, candidate.drafter)
        self.parent = version
        self.tokens_since_parent -= candidate.own_tokens

    @torch.no_grad()
    def _move(self, origin: Drafter, target: Drafter) -> None:
        if origin is target:
            return
        by = torch._foreach_sub(list(target.parameters()), list(origin.parameters()))
        for moved in (self.drafter, self.average):
            torch._foreach_add_(list(moved.parameters()), by)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all that a checkpoint needs: weights, their average, optimizer moments."""
        found: dict[str, Tensor] = {}
        averages = dict(self.average.named_parameters())
        for name, parameter in self.drafter.named_parameters():
            found[f"drafter.{name}"] = parameter.detach().clone()
            found[f"average.{name}"] = averages[name].detach().clone()
            for moment, tensor in self.optimizer.state.get(parameter, {}).items():
                found[f"{moment}.{name}"] = tensor.detach().clone()
        return found


@torch.no_grad()
def _copy(source: Drafter, target: Drafter) -> None:
    for to, of in zip(target.parameters(), source.parameters(), strict=True):
        to.copy_(of)
    target.draft_ids = source.draft_ids
