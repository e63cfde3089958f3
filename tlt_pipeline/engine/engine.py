"""The rollout engine of one slot: continuous batching, one verify path, answers that no drafter can change.

`step` is schedule -> draft and verify -> commit. Plain decoding is verification of no proposal. A proposal is accepted
exactly if the policy's own Gumbel-max draw at that position equals it (design 5.1), so a request's tokens are a
function of policy, prompt, sampling and seed.
Shapes: B = running rows, W = 1 + depth tokens a row in a verify pass, V = vocabulary, C = hidden size.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_pipeline.config import EngineConfig
from tlt_pipeline.engine.accounts import Reason, StrategyAccount
from tlt_pipeline.engine.batch import Batch, Running
from tlt_pipeline.engine.choice import make_policy
from tlt_pipeline.engine.forward import Forward, prefill_features
from tlt_pipeline.engine.invariance import decide_exactness
from tlt_pipeline.engine.layout import Layout
from tlt_pipeline.engine.noise import gumbel_noise, noise_keys, token_hashes
from tlt_pipeline.engine.results import FeaturePiece, Finished
from tlt_pipeline.engine.sampling import Draw, draw
from tlt_pipeline.engine.speculation import propose_chain
from tlt_pipeline.engine.stopping import find_end
from tlt_pipeline.engine.strategies import OFF, BatchState, StepFacts, Strategy, strategies_of
from tlt_pipeline.messages import Claim, DraftStats, FinishReason, RolloutRequest
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_pipeline.models.tokenizer import Tokenizer


class Engine:
    def __init__(
        self,
        policy: Decoder,
        version: int,
        tokenizer: Tokenizer,
        config: EngineConfig,
        feature_chunk: int | None = None,
    ) -> None:
        """`feature_chunk`: features leave in pieces of so many tokens; None: they are not kept.
        Raises ConfigError where `engine.exact: on` can't be had here."""
        self.config, self.tokenizer, self.feature_chunk = config, tokenizer, feature_chunk
        self.depth = config.speculation.depth
        self.layout, self.claim = self._decide_exactness(policy)
        self.drafter: EagleDrafter | None = None
        self.drafter_version = 0
        self.waiting: deque[RolloutRequest] = deque()
        self.pieces: list[FeaturePiece] = []
        self.tokens_committed = 0
        self.choice = make_policy(config.speculation)
        self.account = StrategyAccount()
        self.set_policy(policy, version)

    def _decide_exactness(self, policy: Decoder) -> tuple[Layout, Claim]:
        return decide_exactness(policy, self.config.exact, self.config.max_context + self.depth + 1)

    # --- what the worker says -------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return 0 if self.batch is None else len(self.batch)

    @property
    def room(self) -> int:
        """Requests that could start now."""
        return self.config.max_batch - self.running - len(self.waiting)

    def set_policy(self, policy: Decoder, version: int) -> None:
        """Between requests only: an answer has one policy."""
        assert not getattr(self, "batch", None) and not self.waiting, "a policy changes between requests only"
        self.policy, self.policy_version = policy.requires_grad_(False), version
        self.forward = Forward(policy, self.layout)
        self.hashes = token_hashes(policy.config.vocab_size, policy.embed.weight.device)
        self.batch: Batch | None = None

    def set_drafter(self, drafter: EagleDrafter | None, version: int) -> None:
        """Between any two steps, in mid-answer too: it can't change the tokens."""
        self.drafter = None if drafter is None else drafter.requires_grad_(False)
        self.drafter_version = version
        self.choice.new_drafter()

    def submit(self, request: RolloutRequest) -> None:
        """Raises ValueError for a request that can't be served: other policy version, no token ids, or longer than the
        context."""
        total = request.prompt.length + request.sampling.max_new_tokens
        if request.policy_version != self.policy_version:
            raise ValueError(f"request for policy version {request.policy_version}, loaded is {self.policy_version}")
        if request.prompt.length < 2:
            raise ValueError(f"the prompt of {request.request_id} has fewer than 2 tokens: give it some text")
        tokens, vocab = request.prompt.numpy(), self.policy.config.vocab_size
        if tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"the prompt of {request.request_id} has tokens that are no ids below {vocab}")
        limit = min(self.config.max_context, self.policy.config.max_position_embeddings - self.depth)
        if total > limit:
            raise ValueError(
                f"prompt of {request.prompt.length} and answer of up to {request.sampling.max_new_tokens} tokens "
                f"exceed the context of {limit}: raise engine.max_context or lower rollout.max_new_tokens"
            )
        self.waiting.append(request)

    def free(self) -> None:
        """Gives the KV cache's memory back; the next request allocates it anew."""
        assert not self.running, "the cache is in use"
        self.batch = None

    # --- schedule -> draft and verify -> commit -----------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One decode step for every running answer -> those that ended."""
        batch = self._schedule()
        if not len(batch):
            return []
        began, before = time.perf_counter(), self.tokens_committed
        strategy, counts = self._choose(batch)
        B, context = len(batch), int(batch.lengths[: len(batch)].max())
        noise_BWV = self._noise(batch, strategy.depth + 1)
        proposals_BD = self._draft(batch, noise_BWV, strategy.depth) if strategy.depth else None
        drawn = self._verify(batch, proposals_BD, noise_BWV)
        accepted_B = _count_accepted(drawn.tokens_N.view(B, -1), proposals_BD)
        finished = self._commit(batch, proposals_BD, drawn, accepted_B)
        by_position = tuple(int((accepted_B > position).sum()) for position in range(strategy.depth))
        committed, seconds = self.tokens_committed - before, time.perf_counter() - began
        facts = StepFacts(strategy, B, context, committed, seconds, 1 + strategy.verify, by_position, counts)
        self.choice.measured(facts)
        self.account.add(facts, None if strategy.depth else self._reason())
        return finished

    def _choose(self, batch: Batch) -> tuple[Strategy, bool]:
        """The step's strategy, and whether its time says something of it: not if the drafter has to catch up first."""
        if self.drafter is None:
            return OFF, True
        lengths_B = batch.lengths[: len(batch)]
        remaining_B = np.array([running.remaining for running in batch.running])
        strategies = strategies_of(self.config.speculation)
        available = tuple(each for each in strategies if each.drafter != "ngram" and not each.is_tree)
        strategy = self.choice.choose(BatchState(len(batch), int(lengths_B.max()), remaining_B, available))
        behind = int((lengths_B - batch.drafted_lengths[: len(batch)]).max())
        return strategy, not strategy.depth or behind <= self.depth + 1

    def _reason(self) -> Reason:
        if self.config.speculation.drafter == "off":
            return "switched_off"
        return "no_drafter" if self.drafter is None else "not_chosen"

    def _schedule(self) -> Batch:
        if self.batch is None:
            length = self.layout.padded_length(self.config.max_context + self.depth + 1)
            weight = self.policy.embed.weight
            self.batch = Batch(self.policy.config, self.config.max_batch, length, weight.dtype, weight.device)
        batch, first = self.batch, len(self.batch)
        donors = {tuple(running.prompt): row for row, running in enumerate(batch.running)}
        new: list[tuple[int, ...]] = []
        copies: list[tuple[int, ...]] = []
        arriving = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.config.max_batch - first))]
        # rows to prefill must be consecutive: first those with a prompt nobody has read
        fresh: list[RolloutRequest] = []
        siblings: list[RolloutRequest] = []
        for request in arriving:
            prompt = tuple(request.prompt.tolist())
            known = prompt in donors or prompt in new
            (siblings if known else fresh).append(request)
            (copies if known else new).append(prompt)
        for request, prompt in zip(fresh, new, strict=True):
            donors[prompt] = batch.add(Running(request, list(prompt)))
        self._prefill(batch, new, first)
        for request, prompt in zip(siblings, copies, strict=True):
            batch.copy_prompt(donors[prompt], batch.add(Running(request, list(prompt))))
        return batch

    def _prefill(self, batch: Batch, prompts: list[tuple[int, ...]], first: int) -> None:
        if not prompts:
            return
        read = [list(prompt[:-1]) for prompt in prompts]
        features_BWC = prefill_features(self.forward, batch.cache, read, first)
        width = features_BWC.shape[1]
        batch.features_RLC[first : first + len(read), :width] = features_BWC

    def _noise(self, batch: Batch, width: int) -> Tensor:
        """[B, W, V]: the noise at the W positions after each row's last committed token."""
        B = len(batch)
        positions = (batch.lengths[:B, None] + 1 + np.arange(width)).reshape(-1)
        keys = noise_keys(np.repeat(batch.seeds[:B], width), positions).to(batch.device)
        return gumbel_noise(keys, self.hashes).view(B, width, -1)

    def _draft(self, batch: Batch, noise_BWV: Tensor, depth: int) -> Tensor:
        assert self.drafter is not None
        return propose_chain(self.policy, self.drafter, batch, noise_BWV, depth)

    def _verify(self, batch: Batch, proposals_BD: Tensor | None, noise_BWV: Tensor) -> Draw:
        """One pass over the last committed token and the proposals -> the policy's draw after each of them."""
        B, W = noise_BWV.shape[:2]
        lengths_B = torch.from_numpy(batch.lengths[:B]).to(batch.device)
        positions_BW = lengths_B.unsqueeze(1) + torch.arange(W, device=batch.device)
        tokens_BW = batch.tokens_RL[:B].gather(1, lengths_B.unsqueeze(1))
        if proposals_BD is not None:
            tokens_BW = torch.cat([tokens_BW, proposals_BD], 1)
        hidden_PC = self.forward.hidden(batch.cache, tokens_BW, positions_BW, int(batch.lengths[:B].max()) + W)
        slots_N = (torch.arange(B, device=batch.device).unsqueeze(1) * batch.cache.length + positions_BW).flatten()
        batch.features_RLC.flatten(0, 1).index_copy_(0, slots_N, hidden_PC[: B * W])
        logits_NV = self.forward.logits(hidden_PC)[: B * W]
        return draw(logits_NV, noise_BWV.flatten(0, 1), batch.sampling(W))

    def _commit(
        self, batch: Batch, proposals_BD: Tensor | None, drawn: Draw, accepted_B: NDArray[np.int64]
    ) -> list[Finished]:
        """Keeps the accepted proposals of each row, plus the draw after them."""
        B = len(batch)
        tokens_BW = drawn.tokens_N.view(B, -1)
        W = tokens_BW.shape[1]
        accepted = accepted_B.tolist()
        starts_B = torch.from_numpy(batch.lengths[:B] + 1).to(batch.device)
        batch.tokens_RL[:B].scatter_(1, starts_B.unsqueeze(1) + torch.arange(W, device=batch.device), tokens_BW)
        columns = (
            tokens_BW.tolist(),
            drawn.logprobs_N.view(B, W).tolist(),
            drawn.policy_logprobs_N.view(B, W).tolist(),
        )
        finished = []
        for row in range(B - 1, -1, -1):
            running = batch.running[row]
            if proposals_BD is not None:
                self._count_draft(running, accepted[row], W - 1)
            end = self._extend(running, accepted[row] + 1, *(column[row] for column in columns))
            batch.lengths[row] = len(running.prompt) + len(running.tokens) - 1
            self._stream(batch, row, last=end is not None)
            if end is not None:
                finished.append(self._finish(running, end))
                batch.remove(row)
        return finished

    def _count_draft(self, running: Running, accepted: int, depth: int) -> None:
        running.drafts += 1
        running.drafted += depth
        missing = depth - len(running.accepted_by_position)
        running.accepted_by_position.extend([0] * max(missing, 0))
        for position in range(accepted):
            running.accepted_by_position[position] += 1
        if self.drafter_version not in running.drafter_versions:
            running.drafter_versions.append(self.drafter_version)

    def _extend(
        self,
        running: Running,
        count: int,
        tokens: list[int],
        logprobs: list[float],
        policy_logprobs: list[float],
    ) -> FinishReason | None:
        """Appends up to `count` tokens, no further than where the answer ends; -> why it ended."""
        running.decode_steps += 1
        before = len(running.tokens)
        kept, end = find_end(running.tokens, tokens[:count], running.request.sampling, self.tokenizer)
        running.tokens += tokens[:kept]
        running.logprobs += logprobs[:kept]
        running.policy_logprobs += policy_logprobs[:kept]
        self.tokens_committed += len(running.tokens) - before
        return end

    def _stream(self, batch: Batch, row: int, last: bool) -> None:
        """Copies features out once a chunk is full, or at the answer's end."""
        running, length = batch.running[row], int(batch.lengths[row])
        start = running.streamed
        if self.feature_chunk is None or (length - start < self.feature_chunk and not last) or length == start:
            return
        # the piece's last feature predicts the token after it: that one goes along in the next piece's first pair
        self.pieces.append(
            FeaturePiece(
                request=running.request,
                start=start,
                tokens_T=batch.tokens_RL[row, start:length].clone(),
                features_TC=batch.features_RLC[row, start:length].clone(),
                answer_from=max(len(running.prompt), start),
            )
        )
        running.streamed = length

    def take_pieces(self) -> list[FeaturePiece]:
        taken, self.pieces = self.pieces, []
        return taken

    def _finish(self, running: Running, reason: FinishReason) -> Finished:
        stats = DraftStats(
            drafts=running.drafts,
            drafted=running.drafted,
            accepted=sum(running.accepted_by_position),
            accepted_by_position=tuple(running.accepted_by_position),
            decode_steps=running.decode_steps,
            drafter_versions=tuple(running.drafter_versions),
        )
        return Finished(
            running.request,
            running.tokens,
            running.logprobs,
            running.policy_logprobs,
            reason,
            stats,
            running.started_at,
        )


def _count_accepted(tokens_BW: Tensor, proposals_BD: Tensor | None) -> NDArray[np.int64]:
    """[B]: the length of the longest prefix of proposals that equal the draws."""
    if proposals_BD is None:
        return np.zeros(len(tokens_BW), np.int64)
    matches_BD = tokens_BW[:, :-1] == proposals_BD
    return matches_BD.long().cumprod(1).sum(1).cpu().numpy()


def decode_all(engine: Engine, requests: list[RolloutRequest]) -> list[Finished]:
    """Submits everything, steps to the end -> in the order of `requests`. For replay, benches and tests."""
    finished: dict[str, Finished] = {}
    pending = deque(requests)
    while pending or engine.running or engine.waiting:
        while pending and engine.room:
            engine.submit(pending.popleft())
        for done in engine.step():
            finished[done.request.request_id] = done
    return [finished[request.request_id] for request in requests]
