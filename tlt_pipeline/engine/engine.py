"""The rollout engine of one slot: continuous batching, one verify path, answers that no drafter can change.

`step` is schedule -> draft and verify -> commit. Plain decoding is verification of no proposal. A proposal is accepted
exactly if the policy's own Gumbel-max draw at that position equals it (design 5.1), so a request's tokens are a
function of policy, prompt, sampling and seed.
Shapes: B = running rows, D = depth, E = D + 1, W = nodes a row in a verify pass, V = vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import torch

from tlt_kernels import dispatch
from tlt_pipeline.config import EngineConfig
from tlt_pipeline.engine.accounts import StrategyAccount, hindrance
from tlt_pipeline.engine.admission import Admission
from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.captured_passes import CapturedPasses
from tlt_pipeline.engine.choice import make_policy
from tlt_pipeline.engine.committing import store
from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.engine.graphs import Recorder
from tlt_pipeline.engine.invariance import decide_exactness
from tlt_pipeline.engine.layout import Layout
from tlt_pipeline.engine.ngram import NgramIndex
from tlt_pipeline.engine.noise import noise_keys, token_hashes
from tlt_pipeline.engine.proposals import Accepted, Proposals, accept, pad_chains
from tlt_pipeline.engine.results import FeaturePiece, Finished
from tlt_pipeline.engine.running import Running
from tlt_pipeline.engine.sampling import Draw
from tlt_pipeline.engine.speculation import Drafting, propose_chain
from tlt_pipeline.engine.step_noise import StepNoise, draw
from tlt_pipeline.engine.strategies import BatchState, StepFacts, Strategy, strategies_of
from tlt_pipeline.engine.streaming import FeatureStream
from tlt_pipeline.engine.tree_drafting import propose_tree
from tlt_pipeline.engine.verification import Verified, verify
from tlt_pipeline.messages import Claim, RolloutRequest
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.tokenizer import Tokenizer

NGRAM_TOKENS = 1 << 18
"""Tokens of answers that a worker remembers for n-gram proposals."""


class Engine:
    def __init__(
        self,
        policy: Decoder,
        version: int,
        tokenizer: Tokenizer,
        config: EngineConfig,
        feature_chunk: int | None = None,
        context_window: int = 1024,
        seed: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        """`feature_chunk`: features leave in pieces of so many tokens; None: they are not wanted. `context_window`:
        positions that the drafter looks back at. `seed`: of the strategy choice, which can't change a token. `taps`:
        policy layers that belong to the features, for drafters to come that read them.
        Raises ConfigError where `engine.exact: on` can't be had here."""
        self.config, self.tokenizer, self.context_window = config, tokenizer, context_window
        self.strategies = strategies_of(config.speculation)
        self.depth = max(each.depth for each in self.strategies)
        self._positions = config.max_context + max(each.slots for each in self.strategies)
        self.layout, self.claim = self._decide_exactness(policy)
        self.taps = taps
        self.drafting: Drafting | None = None
        self.drafter_version = 0
        self.waiting: deque[RolloutRequest] = deque()
        self.stream = FeatureStream(feature_chunk)
        self.ngrams = NgramIndex(NGRAM_TOKENS) if any(each.drafter == "ngram" for each in self.strategies) else None
        self.tokens_committed = 0
        self.choice = make_policy(config.speculation, seed)
        self.account = StrategyAccount()
        self.recorder: Recorder | None = None
        """What captures passes instead of CUDA graphs: tests have one that needs no GPU."""
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
        self.layout.prepare(self.policy)
        self._tap(self.taps)
        self.hashes = token_hashes(policy.config.vocab_size, policy.embed.weight.device)
        self.kernels = dispatch.takes_triton(policy.embed.weight)
        self._drop_batch()
        if self.drafting is not None:
            self.drafting = self._pair(self.drafting.drafter)

    def set_drafter(self, drafter: Drafter | None, version: int) -> None:
        """Between any two steps, in mid-answer too: it can't change the tokens. Raises ValueError where it reads other
        layers of the policy than the drafter before, in mid-answer."""
        if drafter is not None and drafter.taps != self.taps:
            self._change_taps(drafter.taps)
        self.drafting = None
        if drafter is not None:
            self.layout.prepare(drafter.requires_grad_(False))
            self.drafting = self._pair(drafter)
        self.drafter_version = version
        self.choice.new_drafter()

    def _change_taps(self, taps: tuple[int, ...]) -> None:
        if self.running:
            raise ValueError(
                f"a drafter that reads the policy's layers {list(taps)} while answers run whose features hold those of "
                f"{list(self.taps)}: one run has drafters of one kind"
            )
        self._drop_batch()
        self._tap(taps)

    def _tap(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.forward = Forward(self.policy, self.layout, taps)
        self.admission = Admission(self.forward, self.ngrams, self.stream)

    def _pair(self, drafter: Drafter) -> Drafting:
        """The drafter beside the policy, its weights also where captured passes read them."""
        passes = self.passes if self.passes is not None and self.passes.fit(drafter) else None
        if passes is not None:
            passes.load_drafter(drafter)
        return Drafting.of(self.policy, drafter, self.context_window, passes)

    def _drop_batch(self) -> None:
        self.batch: Batch | None = None
        self.passes: CapturedPasses | None = None
        if self.drafting is not None:
            self.drafting = replace(self.drafting, passes=None)

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
        self._drop_batch()

    def abandon(self) -> dict[str, list[int]]:
        """Drops every answer, running or waiting, and what n-gram proposals would remember of them: for benches, which
        write the same answers again. -> the tokens of those that ran, by request."""
        self.waiting.clear()
        begun: dict[str, list[int]] = {}
        while self.batch is not None and len(self.batch):
            running = self.batch.running[-1]
            begun[running.request.request_id] = running.tokens
            self.batch.remove(len(self.batch) - 1)
        if self.ngrams is not None:
            self.ngrams = NgramIndex(NGRAM_TOKENS)
            self.admission = Admission(self.forward, self.ngrams, self.stream)
        return begun

    def take_pieces(self) -> list[FeaturePiece]:
        return self.stream.take()

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
        noise, proposals = self._draft(batch, strategy)
        verified, drawn = self._verify(batch, proposals, noise)
        draws_BW = drawn.tokens_N.view(B, -1)
        accepted = accept(None, draws_BW) if proposals is None else dispatch.tree_accept(proposals, draws_BW)
        if proposals is not None:
            self._count_drafts(batch, strategy, proposals, accepted)
        finished = self._commit(batch, verified, drawn, accepted)
        by_position = tuple(int((accepted.counts_B > position).sum()) for position in range(strategy.depth))
        committed, seconds = self.tokens_committed - before, time.perf_counter() - began
        width, drafts = 1, 0
        if proposals is not None:
            width, drafts = proposals.nodes, int(np.count_nonzero(proposals.counts_B))
        facts = StepFacts(strategy, B, context, committed, seconds, width, by_position, counts, drafts)
        self.choice.measured(facts)
        self.account.add(facts, hindrance(self.config.speculation, facts, self.drafting is not None))
        return finished

    def _schedule(self) -> Batch:
        if self.batch is None:
            weight, length = self.policy.embed.weight, self.layout.padded_length(self._positions)
            # what is proposed and not accepted passes through the ring as well
            features = max(self.context_window, self.stream.chunk or 0) + 2 * (self.depth + 1)
            size = (len(self.taps) + 1) * self.policy.config.hidden_size
            self.batch = Batch(
                self.policy.config, self.config.max_batch, length, features, size, weight.dtype, weight.device
            )  # fmt: skip
            if self.batch.cache.tiled and (weight.is_cuda or self.recorder is not None):
                self._capture_passes(self.batch)
        self.admission.fill(self.batch, self.waiting, self.config.max_batch - len(self.batch))
        return self.batch

    def _capture_passes(self, batch: Batch) -> None:
        drafter = None if self.drafting is None else self.drafting.drafter
        self.passes = CapturedPasses(
            self.forward, batch, self.strategies, self.config.speculation.max_batch, self.context_window, drafter
        )
        self.passes.capture(self.recorder)
        if self.drafting is not None:
            self.passes.load_drafter(self.drafting.drafter)
            self.drafting = replace(self.drafting, passes=self.passes)

    def _choose(self, batch: Batch) -> tuple[Strategy, bool]:
        """The step's strategy, and whether its time says something of it: not if the drafter has to catch up first."""
        B = len(batch)
        lengths_B = batch.lengths[:B]
        remaining_B = np.array([running.remaining for running in batch.running])
        strategy = self.choice.choose(BatchState(B, int(lengths_B.max()), remaining_B, self._available()))
        behind = int((lengths_B - batch.drafted_lengths[:B]).max())
        return strategy, strategy.drafter != "eagle" or behind <= self.depth + 1

    def _available(self) -> tuple[Strategy, ...]:
        if self.drafting is not None:
            return self.strategies
        return tuple(each for each in self.strategies if each.drafter != "eagle")

    def _noise(self, batch: Batch, width: int) -> StepNoise:
        """At the positions after each row's last committed token."""
        B = len(batch)
        positions = (batch.lengths[:B, None] + 1 + np.arange(width)).reshape(-1)
        keys_N2 = noise_keys(np.repeat(batch.seeds[:B], width), positions).to(batch.device)
        return StepNoise(keys_N2.view(B, width, 2), self.hashes, kernels=self.kernels)

    def _draft(self, batch: Batch, strategy: Strategy) -> tuple[StepNoise, Proposals | None]:
        """-> (noise of all positions that may be drawn, proposals if there are any)."""
        if strategy.drafter == "ngram":
            proposals = pad_chains([_continue(running, strategy.depth) for running in batch.running], batch.device)
            return self._noise(batch, 1 if proposals is None else proposals.nodes), proposals
        noise = self._noise(batch, strategy.depth + 1)
        if strategy.drafter == "off":
            return noise, None
        assert self.drafting is not None
        if strategy.is_tree:
            return noise, propose_tree(self.drafting, batch, noise, strategy)
        return noise, propose_chain(self.drafting, batch, noise, strategy.depth)

    def _verify(self, batch: Batch, proposals: Proposals | None, noise: StepNoise) -> tuple[Verified, Draw]:
        """One pass -> the policy's draw after each node."""
        verified = verify(self.forward, batch, proposals, exact=self.claim == "exact", passes=self.passes)
        tree = None if proposals is None else proposals.tree
        at_nodes = noise.everywhere() if tree is None else noise.nodes(tree.depths_BW)
        W = 1 if proposals is None else proposals.nodes
        return verified, draw(verified.logits_NV, at_nodes, batch.sampling(W))

    def _count_drafts(self, batch: Batch, strategy: Strategy, proposals: Proposals, accepted: Accepted) -> None:
        version = self.drafter_version if strategy.drafter == "eagle" else None
        counts = zip(proposals.counts_B.tolist(), accepted.counts_B.tolist(), strict=True)
        for running, (proposed, kept) in zip(batch.running, counts, strict=True):
            running.count_draft(proposed, kept, proposals.depth, version)

    def _commit(self, batch: Batch, verified: Verified, drawn: Draw, accepted: Accepted) -> list[Finished]:
        """Keeps the draws along each row's accepted path: the accepted proposals and the one after them."""
        kept = store(batch, verified, drawn, accepted)
        finished = []
        for row in range(len(batch) - 1, -1, -1):
            running = batch.running[row]
            before = len(running.tokens)
            end = running.extend(*kept.row(row, int(accepted.counts_B[row]) + 1), self.tokenizer)
            self.tokens_committed += len(running.tokens) - before
            batch.lengths[row] = len(running.prompt) + len(running.tokens) - 1
            self.stream.advance(batch, row, last=end is not None)
            if end is not None:
                finished.append(running.finish(end))
                batch.remove(row)
        return finished


def _continue(running: Running, depth: int) -> list[int]:
    """The n-gram drafter's proposal: no longer than what the answer may still get."""
    assert running.text is not None
    return running.text.propose(min(depth, running.remaining - 1))


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
