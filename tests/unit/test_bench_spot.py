"""`tlt bench spot`: what it compares is equal, and its report has every ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.tiny import write_tiny_config
from tests.unit.drafter_cases import one_thread, trainer, written  # noqa: F401
from tlt_pipeline.drafter.batching import Batch, DocumentAttention, pack
from tlt_pipeline.drafter.losses import soft_cross_entropy
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.models.decoder import Attend, CausalAttention, Ops
from tlt_services import bench_spot, bench_spot_loss


def loss_of(made: DrafterTrainer, batch: Batch, attend: Attend) -> float:
    embedded = F.embedding(batch.next_tokens_RW, made.frozen.embedding)
    predicted = made.drafter(embedded, batch.hidden_RWC, batch.positions_RW, Ops(attend)).flatten(0, 1)
    weight = batch.weight_RW.flatten()
    return soft_cross_entropy(predicted, batch.targets_RWC.flatten(0, 1), weight, made.frozen).item()


def test_padded_batches_learn_the_same() -> None:
    made, documents = trainer(), [each for each in written() if len(each) > 2][:9]
    packed, padded = pack(documents), bench_spot.pad(documents)
    assert padded.hidden_RWC.shape[:2] == (9, max(map(len, documents)) - 1)
    assert padded.weight_RW.sum() == packed.weight_RW.sum()
    expected = loss_of(made, packed, DocumentAttention(packed.lengths))
    assert loss_of(made, padded, CausalAttention()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_report_has_every_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_spot, "ROUNDS", 2)
    monkeypatch.setattr(bench_spot_loss, "TOKENS", 256)
    monkeypatch.setattr(bench_spot_loss, "MOST_TOKENS", 512)
    file, threads = tmp_path / "spot.json", torch.get_num_threads()
    small = ["rollout.prompts_per_step=8", "drafter.train.tokens_per_batch=64"]
    assert bench_spot.main(write_tiny_config(tmp_path), small, file) == 0
    torch.set_num_threads(threads)
    report = json.loads(file.read_text())
    assert report.keys() == {"streaming", "packing", "checkpoint", "loss_memory"}
    assert 0.5 < report["packing"]["row_filled"] <= 1 and report["packing"]["ratio"] > 0
    assert report["checkpoint"]["ratio"] > 0
    assert report["loss_memory"]["ratio"] > 2
    assert report["streaming"]["answers"] == 16
    assert report["streaming"]["slowdown"] > -1
