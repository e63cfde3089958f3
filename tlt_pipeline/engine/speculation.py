"""Drafting with a trained drafter (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840), on the policy's own noise
(arXiv 2408.07978).

The drafter needn't be exact to the bit: whatever it proposes, the policy's draw decides. It looks back at most
`window` positions, which also bounds what it has to read when it is turned on in mid-answer.
Shapes: B = rows, D = depth, S = pairs to catch up or steps to draft, C = hidden size, V = vocabulary,
v = draft vocabulary, L = cache length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tlt_kernels import dispatch
from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.cache import KVCache, attend_in_steps, attend_to
from tlt_pipeline.engine.forward import PREFILL_WIDTH
from tlt_pipeline.engine.packing import packed_linear
from tlt_pipeline.engine.proposals import Ints, Proposals, chain_proposals
from tlt_pipeline.engine.sampling import RowSampling, first_argmax, perturbed
from tlt_pipeline.engine.step_noise import Noise, StepNoise
from tlt_pipeline.engine.tiled_attention import TiledAttention
from tlt_pipeline.models.decoder import Attend, Decoder, Ops, RMSNorm
from tlt_pipeline.models.drafter import Drafter

if TYPE_CHECKING:
    from tlt_pipeline.engine.captured_passes import CapturedPasses


@dataclass(frozen=True)
class Drafting:
    """A drafter beside its policy. `window`: positions that it looks back at. `norm`, `head_vC`: what scores the tokens
    that may be proposed. `passes`: CUDA graphs of the drafter's passes. `greedy`: proposes its likeliest tokens,
    without the policy's noise (which the policy's draw keeps): for comparison."""

    policy: Decoder
    drafter: Drafter
    window: int
    norm: RMSNorm
    head_vC: Tensor
    passes: CapturedPasses | None = None
    greedy: bool = False

    @classmethod
    def of(cls, policy: Decoder, drafter: Drafter, window: int, passes: CapturedPasses | None = None) -> Drafting:
        head_vC = drafter.draft_head(policy.lm_head.weight)
        return cls(policy, drafter, window, drafter.draft_norm(policy.norm), head_vC, passes)

    def features(self, tokens_N: Tensor, features_NC: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Pairs (token p + 1, hidden state of token p) at positions p -> the predicted ones of tokens p + 1 [N, C]."""
        if self.passes is not None and isinstance(attend, TiledAttention) and self.passes.cover(attend):
            shape = attend.sight.slots_BW.shape
            inputs = tokens_N.view(shape), features_NC.view(*shape, -1), positions_N.view(shape)
            return self.passes.draft(*inputs, attend.sight)
        return self.drafter(self.policy.embed(tokens_N), features_NC, positions_N, Ops(attend, packed_linear))

    def best(self, feature_NC: Tensor, noise: Noise, sampling: RowSampling) -> Tensor:
        """The likeliest token after each feature, of those that may be proposed [N]."""
        if noise.values_NV is None:
            return self._topk(feature_NC, noise, sampling, 1)[0].squeeze(1)
        return self._tokens(first_argmax(self._scores(feature_NC, noise.values_NV, sampling)))

    def children(self, feature_NC: Tensor, noise: Noise, sampling: RowSampling, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest, all different, and the log-softmax of their scores [N, k]."""
        if noise.values_NV is None:
            return self._topk(feature_NC, noise, sampling, k)
        scores_Nv = self._scores(feature_NC, noise.values_NV, sampling)
        best = scores_Nv.topk(k, -1)
        return self._tokens(best.indices), best.values - scores_Nv.logsumexp(-1, keepdim=True)

    def _topk(self, feature_NC: Tensor, noise: Noise, sampling: RowSampling, k: int) -> tuple[Tensor, Tensor]:
        """Scores, the best of them and their normaliser in one kernel."""
        ids_v = self.drafter.draft_ids
        hashes_v = noise.hashes_V if ids_v is None else noise.hashes_V.index_select(0, ids_v)
        index_Nk, scores_Nk = dispatch.draft_topk(self._logits(feature_NC), noise.keys_N2, hashes_v, sampling, k)
        return self._tokens(index_Nk), scores_Nk

    def _scores(self, feature_NC: Tensor, noise_NV: Tensor, sampling: RowSampling) -> Tensor:
        """logits / T + noise of the token that each feature predicts, of those that may be proposed [N, v]."""
        ids_v = self.drafter.draft_ids
        noise_Nv = noise_NV if ids_v is None else noise_NV.index_select(1, ids_v)
        scaled_Nv = self._logits(feature_NC).to(noise_Nv.dtype) * sampling.inverse_temperature_N1
        return perturbed(scaled_Nv, noise_Nv, sampling.noise_scale_N1)

    def _logits(self, feature_NC: Tensor) -> Tensor:
        return packed_linear(self.norm(feature_NC), self.head_vC, None)

    def _tokens(self, index: Tensor) -> Tensor:
        """Places in the draft vocabulary -> token ids."""
        ids_v = self.drafter.draft_ids
        return index if ids_v is None else ids_v[index]

    def sampling(self, batch: Batch, width: int) -> RowSampling:
        """Of the proposals, as `Batch.sampling`."""
        drawn = batch.sampling(width)
        return replace(drawn, noise_scale_N1=torch.zeros_like(drawn.noise_scale_N1)) if self.greedy else drawn

    def cache(self, batch: Batch) -> KVCache:
        if batch.drafter_cache is None:
            batch.drafter_cache = KVCache(
                self.drafter.config, len(batch.seeds), batch.cache.length, batch.dtype, batch.device
            )
            batch.drafted_lengths[:] = batch.drafted_starts[:] = 0
        return batch.drafter_cache

    def since(self, batch: Batch, rows: slice, positions_BS: Ints) -> Tensor | None:
        """The first position that each may look at; None: all of them."""
        since_BS = np.maximum(batch.drafted_starts[rows, None], positions_BS - self.window + 1)
        return torch.from_numpy(since_BS).to(batch.device) if (since_BS > 0).any() else None


def propose_chain(drafting: Drafting, batch: Batch, noise: StepNoise, depth: int) -> Proposals:
    """Proposes `depth` tokens a row after its last committed one. noise: the policy's, at the positions to draw."""
    feature_BC, cache, sampling = catch_up(drafting, batch), drafting.cache(batch), drafting.sampling(batch, 1)
    B = len(batch)
    # the last proposal is not read any more
    positions_BS = batch.lengths[:B, None] + np.arange(depth - 1)
    longest = int(batch.lengths[:B].max()) + depth - 1
    on_device_BS = torch.from_numpy(positions_BS).to(batch.device)
    since_BS = drafting.since(batch, slice(B), positions_BS)
    attends = attend_in_steps(cache, on_device_BS, longest, since_BS) if depth > 1 else []
    proposals: list[Tensor] = []
    for step in range(depth):
        if step:
            feature_BC = drafting.features(proposals[-1], feature_BC, on_device_BS[:, step - 1], attends[step - 1])
        proposals.append(drafting.best(feature_BC, noise.at(step), sampling))
    return chain_proposals(torch.stack(proposals, 1))


def catch_up(drafting: Drafting, batch: Batch) -> Tensor:
    """Reads what was committed since the drafter last ran, no further back than its window -> the predicted feature
    after the last committed token [B, C]."""
    B = len(batch)
    oldest_B = batch.lengths[:B] - drafting.window
    skipped_B = batch.drafted_lengths[:B] < oldest_B
    batch.drafted_lengths[:B][skipped_B] = oldest_B[skipped_B]
    batch.drafted_starts[:B][skipped_B] = oldest_B[skipped_B]
    behind_B = batch.lengths[:B] - batch.drafted_lengths[:B]
    # rows that are far behind the others read up to there alone, so that the others don't wait for them
    for row in np.flatnonzero(behind_B > 2 * behind_B.mean() + PREFILL_WIDTH // 4):
        _read(drafting, batch, int(row), 1, batch.lengths[row : row + 1] - 1)
    return _read(drafting, batch, 0, B, batch.lengths[:B])


def _read(drafting: Drafting, batch: Batch, first: int, count: int, ends_B: Ints) -> Tensor:
    """Reads the pairs up to `ends_B` in passes of bounded width -> the last predicted feature of each row [B, C]."""
    while True:
        start_B = batch.drafted_lengths[first : first + count]
        until_B = np.minimum(ends_B, start_B + PREFILL_WIDTH)
        last_BC = _read_pass(drafting, batch, first, start_B, until_B)
        batch.drafted_lengths[first : first + count] = until_B
        if (until_B == ends_B).all():
            return last_BC
        # who is done repeats the last pair
        batch.drafted_lengths[first : first + count] -= until_B == ends_B


def _read_pass(drafting: Drafting, batch: Batch, first: int, start_B: Ints, end_B: Ints) -> Tensor:
    """Shorter rows repeat their last pair, which rewrites the same values at the same place."""
    counts_B, rows = end_B - start_B, slice(first, first + len(start_B))
    width = int(counts_B.max())
    if drafting.passes is not None:
        width = drafting.passes.draft_width(len(counts_B), width)
    offsets_BS = np.minimum(np.arange(width)[None, :], counts_B[:, None] - 1)
    places_BS = start_B[:, None] + offsets_BS
    positions_BS = torch.from_numpy(places_BS).to(batch.device)
    tokens_BS = batch.tokens_RL[rows].gather(1, positions_BS + 1)
    features_NC = drafting.drafter.fuse(batch.features.gather(first, positions_BS), packed_linear)
    since_BS = drafting.since(batch, rows, places_BS)
    attend = attend_to(drafting.cache(batch), positions_BS, int(end_B.max()), first_row=first, since_BW=since_BS)
    predicted_NC = drafting.features(tokens_BS.flatten(), features_NC, positions_BS.flatten(), attend)
    lasts_B = torch.arange(len(counts_B)) * positions_BS.shape[1] + torch.from_numpy(counts_B - 1)
    return predicted_NC.index_select(0, lasts_B.to(batch.device))
