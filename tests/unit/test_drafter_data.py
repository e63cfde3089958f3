"""From hidden states to training batches: the shard format, the pairing, packing, the buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load, save

from tests.unit.drafter_cases import config, document, one_thread, policy, whole_answers, written  # noqa: F401
from tlt_pipeline.blobs import FileBlobs
from tlt_pipeline.config import HiddenStatesConfig
from tlt_pipeline.drafter.batching import cut, pack, pair_weights, split_documents
from tlt_pipeline.drafter.buffer import DocumentBuffer
from tlt_pipeline.drafter.intake import ShardIntake
from tlt_pipeline.drafter.shards import Document, ShardInvalid, read_shard, write_shard
from tlt_pipeline.messages import BlobRef, HiddenShard
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.weights import WeightsMissing


@pytest.fixture
def store(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


def make_buffer(**settings) -> DocumentBuffer:
    return DocumentBuffer(**{"keep_steps": 2, "byte_limit": 1 << 30, "held_out_share": 0.1, "seed": 0, **settings})


def make_intake(store: FileBlobs, buffer: DocumentBuffer, **hidden_states) -> ShardIntake:
    """Policy 0 is there, other versions are not."""

    def load_policy(version: int) -> Decoder:
        if version:
            raise WeightsMissing(f"policy version {version} was pruned")
        return policy()

    settings = config().model_copy(update={"hidden_states": HiddenStatesConfig(source="recompute", **hidden_states)})
    return ShardIntake(store, buffer, policy().config, settings, load_policy)


def shard_of(blob: BlobRef, version: int = 0, held_out: bool = False) -> HiddenShard:
    return HiddenShard(
        shard_id=blob.name, blob=blob, slot=0, step=version, policy_version=version, documents=1, tokens=1,
        held_out=held_out,
    )  # fmt: skip


# --- shards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shard_comes_back_as_written(store: FileBlobs, dtype: torch.dtype) -> None:
    documents = [document(5, position=7, prompt=2), document(3, first_token=40), document(1)]
    documents = [Document(each.token_ids, each.hidden.to(dtype), each.loss_mask, each.position) for each in documents]
    back = read_shard(store, write_shard(store, documents, "one"))
    assert [each.position for each in back] == [7, 0, 0]
    for found, wanted in zip(back, documents, strict=True):
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.hidden, wanted.hidden) and found.hidden.dtype == dtype
        assert torch.equal(found.loss_mask, wanted.loss_mask)


def test_what_is_no_shard_is_refused(store: FileBlobs) -> None:
    good = load(store.read(write_shard(store, [document(4), document(4)], "good")))
    hidden = good["hidden"].clone()
    hidden[1, 1] = float("nan")
    bad = {
        "missing": {name: tensor for name, tensor in good.items() if name != "hidden"},
        "lengths": {**good, "loss_mask": good["loss_mask"][:-1]},
        "offsets": {**good, "starts": good["starts"].flip(0).contiguous()},
        "beyond": {**good, "starts": torch.tensor([0, 8], dtype=torch.int32)},
        "none": {**good, "starts": good["starts"][:0], "positions": good["positions"][:0]},
        "negative": {**good, "positions": torch.tensor([0, -1], dtype=torch.int32)},
        "nan": {**good, "hidden": hidden},
        "dtype": {**good, "token_ids": good["token_ids"].float()},
    }
    for name, tensors in bad.items():
        with pytest.raises(ShardInvalid):
            read_shard(store, store.write(name, save(tensors)))
    with pytest.raises(ShardInvalid):
        read_shard(store, store.write("text", b"no tensors here"))
    with pytest.raises(ShardInvalid):
        write_shard(store, [], "empty")
    with pytest.raises(ShardInvalid):
        write_shard(store, [document(4), document(4, size=8)], "sizes")


# --- pairs --------------------------------------------------------------------------------------------------------


def test_pairs_next_token_with_this_feature_and_the_next_one_as_target() -> None:
    """Token t is 100 + t, feature t is t: an input or a target that is off by one shows."""
    batch = pack([document(6, position=50, prompt=3, first_token=100)])
    assert batch.hidden_RWC[0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert batch.next_tokens_RW[0].tolist() == [101, 102, 103, 104, 105]
    assert batch.targets_RWC[0, :, 0].tolist() == [1, 2, 3, 4, 5]
    assert batch.positions_RW[0].tolist() == [50, 51, 52, 53, 54]
    # pair t says what is drawn as token t+2: answer tokens are 3, 4, 5; the last pair's is the one behind the end
    assert batch.weight_RW[0].tolist() == [0, 1, 1, 1, 1]


def test_last_pair_counts_only_inside_the_answer() -> None:
    assert pair_weights(torch.tensor([0, 0, 0], dtype=torch.uint8)).tolist() == [0, 0]
    assert pair_weights(torch.tensor([0, 0, 1], dtype=torch.uint8)).tolist() == [1, 1]
    assert pair_weights(torch.tensor([1, 1], dtype=torch.uint8)).tolist() == [1]


def test_packing_restarts_positions_and_keeps_documents_apart() -> None:
    documents = [document(4, position=9), document(9, first_token=20), document(5, first_token=50), document(3)]
    batch = pack(documents)
    assert batch.next_tokens_RW.shape == (1, 3 + 8 + 4 + 2)  # no padding
    for index, wanted in enumerate(documents):
        inside = batch.documents_RW == index
        assert batch.positions_RW[inside].tolist() == list(range(wanted.position, wanted.position + len(wanted) - 1))
        assert batch.offsets_RW[inside].tolist() == list(range(len(wanted) - 1))
        assert batch.next_tokens_RW[inside].tolist() == wanted.token_ids[1:].tolist()


def test_cutting_a_long_document_loses_no_pair() -> None:
    whole = document(23, position=4, prompt=5)
    pieces = cut(whole, 8)
    assert max(map(len, pieces)) <= 8
    pairs = [
        (int(piece.token_ids[t + 1]), float(piece.hidden[t, 0]), piece.position + t)
        for piece in pieces
        for t in range(len(piece) - 1)
    ]
    assert pairs == [(t + 1, float(t), 4 + t) for t in range(22)]
    assert [len(piece) for piece in cut(document(8), 8)] == [8]


def test_groups_stay_below_the_limit() -> None:
    groups = list(split_documents([document(length) for length in (5, 5, 30, 2, 2)], 10))
    assert [[len(each) for each in group] for group in groups] == [[5, 5], [30], [2, 2]]


# --- buffer -------------------------------------------------------------------------------------------------------


def test_buffer_outlives_a_step_and_forgets_by_age() -> None:
    buffer = make_buffer(keep_steps=2)
    for version in range(4):
        assert buffer.add([document(10 + version)], version, held_out=False) == 1
    assert sorted(len(each) for each in buffer.draw(1000)) == [12, 13]
    assert buffer.add([document(5)], 1, held_out=False) == 0


def test_buffer_stays_below_its_bytes_and_drops_the_oldest() -> None:
    buffer = make_buffer(byte_limit=3 * 10 * 64 * 4)
    buffer.add([document(10, first_token=0)], 0, held_out=False)
    buffer.add([document(10, first_token=100 * index) for index in range(1, 4)], 1, held_out=False)
    assert buffer.bytes_used <= 3 * 10 * 64 * 4
    assert 0 not in [int(each.token_ids[0]) for each in buffer.draw(1000)]


def test_every_document_comes_once_an_epoch_and_new_ones_first() -> None:
    buffer = make_buffer()
    buffer.add([document(10, first_token=500)], 0, held_out=True)
    buffer.add([document(10, first_token=index) for index in range(6)], 0, held_out=False)
    assert len(buffer.draw(20)) == 2
    buffer.add([document(10, first_token=100 + index) for index in range(2)], 0, held_out=False)
    assert {int(each.token_ids[0]) for each in buffer.draw(20)} == {100, 101}
    rest = [int(each.token_ids[0]) for _ in range(2) for each in buffer.draw(20)]
    assert len(set(rest)) == 4 and max(rest) < 100
    again = [int(each.token_ids[0]) for _ in range(4) for each in buffer.draw(20)]
    assert sorted(again) == [0, 1, 2, 3, 4, 5, 100, 101]
    assert len(buffer.draw(3)) == 1  # a document above the limit still comes


def test_batches_are_filled_whatever_the_lengths() -> None:
    """Long-tailed lengths, in batches of little more than the longest: at least 90 % of a batch are tokens."""
    buffer = make_buffer()
    buffer.add([document(10)], 0, held_out=True)
    random = Random(0)
    lengths = [min(8 + int(random.lognormvariate(3.4, 0.8)), 400) for _ in range(400)]
    buffer.add([document(length, size=1) for length in lengths], 0, held_out=False)
    drawn = [buffer.draw(512) for _ in range(60)]
    filled = [sum(map(len, documents)) for documents in drawn]
    assert max(filled) <= 512
    assert sum(filled) / (512 * len(filled)) > 0.9
    assert all(len(set(map(id, documents))) == len(documents) for documents in drawn)


def test_long_answers_of_the_step_before_are_preferred() -> None:
    """The current step has short ones so far: all of them, and the long ones of the step before, come twice as often
    as what is short and old."""
    buffer = make_buffer()
    buffer.add([document(10)], 0, held_out=True)
    buffer.add([document(length) for length in (10, 11, 60, 61)], 0, held_out=False)
    buffer.add([document(length) for length in (12, 13, 14)], 1, held_out=False)
    times = Counter(len(buffer.draw(1)[0]) for _ in range(60))
    assert sum(times.values()) == 60
    assert all(times[long] == pytest.approx(2 * times[short], abs=2) for long in (60, 61) for short in (10, 11))
    assert all(times[new] == pytest.approx(times[60], abs=2) for new in (12, 13, 14))


def test_above_its_bytes_the_short_ones_of_the_oldest_version_go() -> None:
    buffer = make_buffer(byte_limit=(60 + 50 + 5) * 64 * 4)
    buffer.add([document(10)], 0, held_out=True)
    buffer.add([document(length) for length in (60, 20, 50)], 0, held_out=False)
    buffer.add([document(5)], 1, held_out=False)
    assert sorted(len(each) for each in buffer.draw(1000)) == [5, 60]  # held-out ones stay, so 50 had to go as well


def test_held_out_documents_are_never_drawn() -> None:
    buffer = make_buffer()
    buffer.add([document(10, first_token=500)], 0, held_out=True)
    buffer.add([document(10, first_token=index) for index in range(5)], 0, held_out=False)
    assert [int(each.token_ids[0]) for each in buffer.held_out(1000)] == [500]
    assert len(buffer.draw(1000)) == 5


def test_without_held_out_shards_a_share_of_the_others_is_kept_apart() -> None:
    buffer = make_buffer(held_out_share=0.2)
    buffer.add([document(10, first_token=index) for index in range(10)], 0, held_out=False)
    held_out = {int(each.token_ids[0]) for each in buffer.held_out(1000)}
    drawn = {int(each.token_ids[0]) for each in buffer.draw(1000)}
    assert len(held_out) == 2 and not held_out & drawn


def test_held_out_documents_are_of_many_steps_and_stay_the_same() -> None:
    buffer = make_buffer(keep_steps=4)
    for version in range(4):
        documents = [document(10, first_token=100 * version + index) for index in range(8)]
        buffer.add(documents, version, held_out=True)
    chosen = buffer.held_out(80)
    assert sorted(int(each.token_ids[0]) // 100 for each in chosen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(one is other for one, other in zip(chosen, buffer.held_out(80), strict=True))
    changes = buffer.held_out_changes
    buffer.add([document(10)], 4, held_out=False)
    assert buffer.held_out_changes > changes  # version 0 went
    assert all(int(each.token_ids[0]) >= 100 for each in buffer.held_out(80))


def test_documents_without_a_pair_are_left_out() -> None:
    assert make_buffer().add([document(1), document(6, prompt=6)], 0, held_out=False) == 0


# --- intake -------------------------------------------------------------------------------------------------------


def test_unusable_shards_are_dropped_with_their_reason(store: FileBlobs) -> None:
    buffer = make_buffer()
    intake = make_intake(store, buffer)
    good = shard_of(write_shard(store, [document(10)], "good"), version=5)
    gone = shard_of(write_shard(store, [document(10)], "gone"), version=5)
    store.delete("gone")
    torn = shard_of(write_shard(store, [document(10)], "torn"), version=5)
    (store.root / "torn").write_bytes(store.read(torn.blob)[:-1] + b"?")
    text = shard_of(store.write("text", b"no tensors here"), version=5)
    other = shard_of(write_shard(store, [document(10, size=8)], "other"), version=5)
    vocabulary = shard_of(write_shard(store, [document(10, first_token=100)], "vocabulary"), version=5)
    beyond = shard_of(write_shard(store, [document(10, position=250)], "beyond"), version=5)
    old = shard_of(write_shard(store, [document(10)], "old"), version=3)
    assert intake.take([good, gone, torn, text, other, vocabulary, beyond]) == []
    assert intake.take([good, old]) == []
    assert intake.counts == {"read": 1, "missing": 1, "corrupt": 1, "invalid": 4, "known": 1, "too_old": 1}
    assert len(buffer) == 1


def test_shards_left_by_a_stop_are_taken_later(store: FileBlobs) -> None:
    buffer, intake = make_buffer(), make_intake(store, make_buffer())
    shards = [shard_of(write_shard(store, [document(10)], f"s{number}")) for number in range(3)]
    assert intake.take(shards, should_stop=lambda: True) == shards
    intake = make_intake(store, buffer)
    assert intake.take(shards, should_stop=lambda: intake.counts["read"] == 2) == shards[2:]
    assert intake.take(shards) == []
    assert intake.counts == {"read": 3, "known": 2}


# --- recomputing --------------------------------------------------------------------------------------------------


def test_recomputed_states_are_those_that_the_rollout_had(store: FileBlobs) -> None:
    """Tokens alone go into the shard; what comes out is what was streamed, in bfloat16."""
    wanted = whole_answers()
    alone = [replace(each, hidden=each.hidden[:, :0]) for each in wanted]
    buffer = make_buffer(byte_limit=1 << 30)
    buffer.add([document(10)], 0, held_out=True)
    intake = make_intake(store, buffer)
    blob = write_shard(store, alone, "tokens")
    assert blob.size < 0.2 * write_shard(store, wanted, "states").size
    stopped = intake.take([shard_of(blob)], should_stop=iter([False, False, True]).__next__)
    assert len(stopped) == 1 and not len(buffer)  # in the middle of it
    assert intake.take(stopped) == [] and intake.counts == {"read": 1}
    found = {tuple(each.token_ids.tolist()): each for each in buffer.draw(1 << 20)}
    for each in wanted:
        back = found[tuple(each.token_ids.tolist())]
        assert torch.equal(back.loss_mask, each.loss_mask)
        torch.testing.assert_close(back.hidden, each.hidden, atol=0.02, rtol=0.02)


def test_of_a_long_answer_the_part_to_be_trained_on_is_kept(store: FileBlobs) -> None:
    (whole,) = sorted(whole_answers(), key=len)[-1:]
    mask = torch.zeros(len(whole), dtype=torch.uint8)
    mask[20:28] = 1
    part = Document(whole.token_ids[:28], whole.hidden[:28, :0], mask[:28], 0)
    buffer = make_buffer()
    buffer.add([document(10)], 0, held_out=True)
    make_intake(store, buffer, tokens_per_answer=8).take([shard_of(write_shard(store, [part], "part"))])
    (kept,) = buffer.draw(1000)
    assert (kept.position, len(kept), kept.loss_mask.tolist()) == (19, 9, [0] + 8 * [1])
    torch.testing.assert_close(kept.hidden, whole.hidden[19:28], atol=0.02, rtol=0.02)


def test_without_the_policy_that_wrote_it_a_shard_is_dropped_with_the_reason(store: FileBlobs) -> None:
    alone = replace(whole_answers()[0], hidden=whole_answers()[0].hidden[:, :0])
    intake = make_intake(store, make_buffer())
    assert intake.take([shard_of(write_shard(store, [alone], "tokens"), version=7)]) == []
    assert intake.counts == {"policy_missing": 1}
