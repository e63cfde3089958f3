"""The drafter's objective: equal to its plain definition, packed or not, in one chunk or many, unrolled as drafted."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.drafter_cases import DEPTH, document, one_thread, policy, written  # noqa: F401
from tlt_pipeline.drafter import losses
from tlt_pipeline.drafter.batching import Batch, pack
from tlt_pipeline.drafter.evaluation import evaluate, expected_passes
from tlt_pipeline.drafter.losses import FrozenParts, feature_loss, soft_cross_entropy
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.unrolling import step_weights, unroll
from tlt_pipeline.models.decoder import CausalAttention, Ops
from tlt_pipeline.models.drafter import EagleDrafter, drafter_from_policy


@pytest.fixture
def frozen() -> FrozenParts:
    return FrozenParts.of(policy(), 0)


def features(count: int, seed: int) -> Tensor:
    return torch.randn(count, policy().config.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("elements", [1 << 22, 300], ids=["one chunk", "many chunks"])
def test_soft_cross_entropy_and_its_gradient(
    frozen: FrozenParts, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", elements)
    predicted, target, weight = features(33, 0).requires_grad_(), features(33, 1), torch.rand(33)
    loss = soft_cross_entropy(predicted, target, weight, frozen)
    (gradient,) = torch.autograd.grad(3 * loss, predicted)
    wanted = (
        F.cross_entropy(policy().logits(predicted), policy().logits(target).softmax(-1), reduction="none") * weight
    ).sum()
    (wanted_gradient,) = torch.autograd.grad(3 * wanted, predicted)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-5, rtol=1e-4)


def test_saturated_scores_stay_finite(frozen: FrozenParts) -> None:
    """A policy that is sure, and a drafter that is sure of something else."""
    loud = FrozenParts(frozen.embedding, frozen.norm, frozen.head * 1e4, 0)
    predicted = features(9, 0).requires_grad_()
    loss = soft_cross_entropy(predicted, features(9, 1), torch.ones(9), loud)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(predicted.grad).all()


def test_large_head_in_half_precision_is_near(frozen: FrozenParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LARGE_HEAD", 1)
    monkeypatch.setattr(losses, "choose_dtype", lambda *_: torch.bfloat16)
    half = FrozenParts.of(policy(), 0)
    assert half.head.dtype == torch.bfloat16
    predicted, target, weight = features(50, 0).requires_grad_(), features(50, 1), torch.ones(50)
    results = []
    for parts in (frozen, half):
        loss = soft_cross_entropy(predicted, target, weight, parts)
        results.append((loss.detach(), torch.autograd.grad(loss, predicted)[0]))
    (full_loss, full_slope), (half_loss, half_slope) = results
    assert abs(half_loss / full_loss - 1) < 0.01
    assert F.cosine_similarity(full_slope.flatten(), half_slope.flatten(), dim=0) > 0.99


def test_feature_loss_does_not_depend_on_the_features_size() -> None:
    predicted, target, weight = features(20, 0), features(20, 1), torch.ones(20)
    torch.testing.assert_close(
        feature_loss(100 * predicted, 100 * target, weight), feature_loss(predicted, target, weight)
    )


def losses_of(drafter: EagleDrafter, frozen: FrozenParts, documents: list[Document]) -> Tensor:
    return loss_of_batch(drafter, frozen, pack(documents))


def loss_of_batch(drafter: EagleDrafter, frozen: FrozenParts, batch: Batch) -> Tensor:
    predicted = unroll(drafter, frozen.embedding, batch, 1).flatten(0, 2)
    targets, weight = batch.targets_RWC.flatten(0, 1), batch.weight_RW.flatten()
    return soft_cross_entropy(predicted, targets, weight, frozen)


def in_double(batch: Batch) -> Batch:
    wide = {name: tensor.double() for name, tensor in vars(batch).items() if name in ("hidden_RWC", "targets_RWC")}
    return replace(batch, **wide)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_packed_documents_train_like_single_ones(frozen: FrozenParts, double: bool) -> None:
    """Loss and gradients of a packed batch equal the sums over documents by themselves, within 1e-5."""
    drafter = drafter_from_policy(policy())
    if double:
        drafter, wide = drafter.double(), copy.deepcopy(frozen.norm).double()
        frozen = replace(frozen, embedding=frozen.embedding.double(), norm=wide, head=frozen.head.double())
    documents = [each for each in written() if len(each) > 2][:24]
    parameters = list(drafter.parameters())
    whole, parts = pack(documents), [pack([each]) for each in documents]
    if double:
        whole, parts = in_double(whole), [in_double(part) for part in parts]
    packed = loss_of_batch(drafter, frozen, whole)
    single = torch.stack([loss_of_batch(drafter, frozen, part) for part in parts]).sum()
    count = whole.weight_RW.sum()
    torch.testing.assert_close(packed / count, single / count, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(packed / count, parameters), torch.autograd.grad(single / count, parameters), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_unrolled_steps_equal_drafting_one_token_after_the_other(frozen: FrozenParts) -> None:
    """Depth k's feature at place s: true features up to s - k + 1, then the drafter's own, as in the KV cache."""
    drafter = drafter_from_policy(policy())
    documents = [next(each for each in written() if len(each) >= 12), document(5, size=64), document(7, size=64)]
    batch = pack(documents)
    predicted = unroll(drafter, frozen.embedding, batch, DEPTH)
    weights = step_weights(batch, DEPTH)
    subject = documents[0]
    embeddings = frozen.embedding[subject.token_ids.long()]
    row, columns = 0, range(len(subject) - 1)
    assert batch.documents_RW[row, : len(subject) - 1].unique().tolist() == [0]
    for depth in range(1, DEPTH + 1):
        for place in columns:
            if place < depth - 1:
                assert weights[depth - 1, row, place] == 0
                continue
            known = place - depth + 2  # places with the policy's own features
            inputs = subject.hidden[:known].float()
            for _ in range(depth):
                length = len(inputs)
                positions = subject.position + torch.arange(length)
                out = drafter(embeddings[None, 1 : length + 1], inputs[None], positions[None], Ops(CausalAttention()))
                inputs = torch.cat([inputs, out[0, -1:]])
            torch.testing.assert_close(predicted[depth - 1, row, place], inputs[-1], atol=1e-4, rtol=1e-4)


def test_evaluation_of_a_perfect_and_of_a_blind_drafter(frozen: FrozenParts) -> None:
    """With a policy whose feature is the embedding of its token, a drafter that passes the embedding on is perfect at
    every depth, and only if it got the embedding of token t+1."""
    drafter = drafter_from_policy(policy())
    size = policy().config.hidden_size
    with torch.no_grad():
        for parameter in drafter.layer.parameters():
            parameter.zero_()
        drafter.fc.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
    tokens = torch.randint(2, policy().config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    answer = Document(tokens.int(), frozen.embedding[tokens], torch.ones(40, dtype=torch.uint8), 0)
    settings = {"depth": DEPTH, "temperature": 1.0, "tokens_at_once": 256}
    perfect = evaluate(drafter, frozen, [answer], **settings)
    assert perfect is not None and min(perfect.agreement) > 0.9999 and perfect.pairs == 39
    assert perfect.acceptance_length == pytest.approx(39 / 10, abs=1e-2)  # 10 passes of 4 tokens, the last one of 3
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)], 1))
    behind = evaluate(drafter, frozen, [answer], **settings)  # one token late
    assert behind is not None and max(behind.agreement) < 0.8 and behind.loss > 1.3 * perfect.loss
    greedy = evaluate(drafter, frozen, [answer], **{**settings, "temperature": 0.0})
    assert greedy is not None and max(greedy.agreement) < 0.5


def test_expected_passes_are_those_of_drafting() -> None:
    """Against drafting many times with coins of these probabilities."""
    random = np.random.default_rng(0)
    agree = random.random((3, 14)) * np.linspace(0.2, 1.0, 14)
    passes = 0
    for _ in range(4000):
        right = random.random(agree.shape) < agree
        place = 0
        while place < 14:
            depth = 0
            while depth < 3 and place + depth < 14 and right[depth, place + depth]:
                depth += 1
            passes, place = passes + 1, place + depth + 1
    assert expected_passes(agree) == pytest.approx(passes / 4000, rel=0.01)
    assert expected_passes(np.zeros((3, 8))) == 8
    assert expected_passes(np.ones((3, 8))) == 2


def test_evaluation_is_the_same_in_any_grouping_and_can_be_stopped(frozen: FrozenParts) -> None:
    drafter, documents = drafter_from_policy(policy()), list(written()[:20])
    whole = evaluate(drafter, frozen, documents, depth=2, temperature=1.0, tokens_at_once=10_000)
    parts = evaluate(drafter, frozen, documents, depth=2, temperature=1.0, tokens_at_once=40)
    assert whole is not None and parts is not None
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.agreement == pytest.approx(whole.agreement, rel=1e-5)
    assert parts.cross_entropy == pytest.approx(whole.cross_entropy, rel=1e-5)
    settings = {"depth": 2, "temperature": 1.0, "tokens_at_once": 40}
    assert evaluate(drafter, frozen, documents, **settings, should_stop=lambda: True) is None
    assert evaluate(drafter, frozen, [], **settings) is None
