"""Chain drafting with the EAGLE drafter (arXiv 2401.15077), on the policy's own noise (arXiv 2408.07978).

The drafter needn't be exact to the bit: whatever it proposes, the policy's draw decides.
Shapes: B = rows, D = depth, S = pairs to catch up or steps to draft, C = hidden size, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.cache import KVCache, attend_in_steps, attend_to
from tlt_pipeline.engine.sampling import perturbed_argmax
from tlt_pipeline.models.decoder import Decoder, Ops
from tlt_pipeline.models.drafter import EagleDrafter


def propose_chain(policy: Decoder, drafter: EagleDrafter, batch: Batch, noise_BWV: Tensor, depth: int) -> Tensor:
    """Proposes `depth` tokens a row after its last committed one -> int64 [B, D]. noise_BWV: the policy's noise at
    the positions to draw. Catches the drafter's cache up with what was committed since it last ran."""
    cache = _drafter_cache(drafter, batch)
    sampling = batch.sampling(1)
    feature_BC = _catch_up(policy, drafter, cache, batch)
    lengths_B = batch.lengths[: len(batch)]
    # the last proposal is not read any more
    positions_BS = torch.from_numpy(lengths_B[:, None] + np.arange(depth - 1)).to(batch.device)
    attends = attend_in_steps(cache, positions_BS, int(lengths_B.max()) + depth - 1) if depth > 1 else []
    proposals: list[Tensor] = []
    for step in range(depth):
        if step:
            ops = Ops(attends[step - 1])
            feature_BC = drafter(policy.embed(proposals[-1]), feature_BC, positions_BS[:, step - 1], ops)
        scaled_BV = policy.logits(feature_BC).to(noise_BWV.dtype) * sampling.inverse_temperature_N1
        proposals.append(perturbed_argmax(scaled_BV, noise_BWV[:, step], sampling.noise_scale_N1))
    return torch.stack(proposals, 1)


def _drafter_cache(drafter: EagleDrafter, batch: Batch) -> KVCache:
    if batch.drafter_cache is None:
        rows, length = batch.tokens_RL.shape
        batch.drafter_cache = KVCache(drafter.config, rows, length, batch.dtype, batch.device)
        batch.drafted_lengths[:] = 0
    return batch.drafter_cache


def _catch_up(policy: Decoder, drafter: EagleDrafter, cache: KVCache, batch: Batch) -> Tensor:
    """Reads the pairs (embedding of token p+1, feature of token p) for every p that was committed since -> the
    predicted feature of the last committed token [B, C]. Shorter rows repeat their last pair, which rewrites the
    same values at the same place."""
    B = len(batch)
    start, end = batch.drafted_lengths[:B], batch.lengths[:B]
    counts = end - start
    offsets = np.minimum(np.arange(counts.max())[None, :], counts[:, None] - 1)
    positions_BS = torch.from_numpy(start[:, None] + offsets).to(batch.device)
    next_BS = batch.tokens_RL[:B].gather(1, positions_BS + 1)
    rows_B1 = torch.arange(B, device=batch.device).unsqueeze(1)
    features_BSC = batch.features_RLC[rows_B1, positions_BS]
    attend = attend_to(cache, positions_BS, int(end.max()))
    positions_N = positions_BS.flatten()
    predicted_NC = drafter(policy.embed(next_BS.flatten()), features_BSC.flatten(0, 1), positions_N, Ops(attend))
    batch.drafted_lengths[:B] = end
    last_B = torch.from_numpy(counts - 1).to(batch.device)
    return predicted_NC.view(B, -1, predicted_NC.shape[-1])[rows_B1.squeeze(1), last_B]
