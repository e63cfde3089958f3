"""The drafter that a run begins with, as the config says: its kind, its origin, the policy layers that it taps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tlt_pipeline.config import RunConfig
from tlt_pipeline.drafter.vocabulary import choose_vocabulary
from tlt_pipeline.models.checkpoint import load_drafter
from tlt_pipeline.models.decoder import Decoder, DecoderConfig
from tlt_pipeline.models.drafter import Drafter, drafter_from_policy
from tlt_pipeline.models.drafter_config import read_taps
from tlt_pipeline.models.eagle3 import default_taps
from tlt_pipeline.models.eagle3_start import eagle3_from_policy
from tlt_pipeline.models.export_layout import check_kind

OWN_HEAD_FEWEST = 4096
"""Tokens of a head that can't change any more: it is chosen by few answers, so it has room for others."""


def load_initial(config: RunConfig, folder: Path, policy: DecoderConfig) -> Drafter:
    """Raises ModelError where the folder holds no drafter for this policy, or one of another kind."""
    drafter = load_drafter(folder, policy)
    check_kind(drafter.kind, config.drafter.kind, folder)
    return drafter


def fit_initial(config: RunConfig, policy: Decoder, texts: Sequence[Tensor]) -> Drafter:
    """A start that already drafts, from the policy and `texts` that it wrote (token ids [T] each). float32."""
    if config.drafter.kind == "eagle":
        return drafter_from_policy(policy, texts).float()
    counts_V = torch.zeros(policy.config.vocab_size, dtype=torch.int64)
    for tokens_T in texts:
        counts_V += torch.bincount(tokens_T.cpu(), minlength=policy.config.vocab_size)
    chosen_v = choose_vocabulary(counts_V, config.drafter.vocabulary, None, fewest=OWN_HEAD_FEWEST)
    return eagle3_from_policy(policy, texts, chosen_v).float()


def feature_taps(config: RunConfig, policy: DecoderConfig) -> tuple[int, ...]:
    """The policy layers whose inputs the run's drafter reads: what its features consist of besides the last hidden
    state. The same in every process, before there is a drafter."""
    if config.drafter.kind == "eagle":
        return ()
    folder = Path(config.drafter.init).expanduser()
    layers = policy.num_layers
    return read_taps(folder, layers) if (folder / "config.json").is_file() else default_taps(layers)
