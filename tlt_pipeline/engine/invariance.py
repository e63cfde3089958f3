"""The start-up check behind the claim of a run (design 5.1): does a row's result depend on the batch around it?

The same tokens are read one at a time alone, and in batches and verify widths as the engine will use them; the logits
must be equal to the bit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tlt_pipeline.config import ConfigError
from tlt_pipeline.engine.cache import KVCache
from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.messages import Claim
from tlt_pipeline.models.decoder import Decoder


def decide_exactness(
    policy: Decoder, wanted: Literal["auto", "on", "off"], batch: int, width: int
) -> tuple[bool, Claim]:
    """-> (compute batch-invariantly, what may be claimed). Raises ConfigError where exactness was demanded
    (`engine.exact: on`) and this machine doesn't give it."""
    dtype = policy.embed.weight.dtype
    fallback: Claim = "distribution" if dtype == torch.bfloat16 else "float32"
    if wanted == "off":
        return False, fallback
    if is_batch_invariant(Forward.of(policy, exact=True), batch, width):
        return True, "exact"
    if wanted == "on":
        raise ConfigError(
            f"engine.exact is on, but on this machine a row's bits depend on the batch in {dtype}: "
            f"set engine.exact to auto, or try engine.dtype=float32 or other engine.threads"
        )
    return False, fallback


@torch.inference_mode()
def is_batch_invariant(forward: Forward, batch: int, width: int, length: int = 136) -> bool:
    """Compares reading `length` random tokens in one row, a token a pass, with batches of up to `batch` rows and
    `width` tokens a pass."""
    config, device = forward.policy.config, forward.policy.embed.weight.device
    length = min(length, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(config.vocab_size, (batch, length), generator=generator).to(device)
    reference = _read(forward, tokens_BT[:1], [1] * length)
    shapes = [
        (1, width),
        (batch, 1),
        (batch, width),
        (min(3, batch), max(2, width - 1)),
        (2 if batch > 1 else 1, 7),
    ]
    return all(torch.equal(reference, _read(forward, tokens_BT[:rows], _widths(length, w))) for rows, w in shapes)


def _widths(length: int, width: int) -> list[int]:
    whole, rest = divmod(length, width)
    return [width] * whole + ([rest] if rest else [])


def _read(forward: Forward, tokens_BT: Tensor, widths: list[int]) -> Tensor:
    """Logits of the first row [T, V]."""
    weight = forward.policy.embed.weight
    cache = KVCache(forward.policy.config, tokens_BT.shape[0], tokens_BT.shape[1] + 64, weight.dtype, weight.device)
    logits, start = [], 0
    for width in widths:
        positions_W = torch.arange(start, start + width, device=weight.device)
        tokens_BW = tokens_BT[:, start : start + width]
        # rows at different lengths stretch what attention sees, as in a real batch
        longest = start + width + (64 if tokens_BT.shape[0] > 1 else 0)
        hidden = forward.hidden(cache, tokens_BW, positions_W.expand_as(tokens_BW), longest)
        logits.append(forward.logits(hidden)[:width])
        start += width
    return torch.cat(logits)
