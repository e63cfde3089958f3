"""What of the rollout's features becomes a shard: by its worth where there is no room for all, and never an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit import engine_cases
from tests.unit.drafter_cases import one_thread, policy  # noqa: F401
from tlt_pipeline.blobs import FileBlobs
from tlt_pipeline.config import ConfigError, HiddenStatesConfig, validate_config
from tlt_pipeline.drafter.shards import Document, read_shard
from tlt_pipeline.drafter.streaming import ShardStream
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.results import FeaturePiece
from tlt_pipeline.messages import HiddenShard, RolloutRequest

SIZE = 8


@pytest.fixture
def store(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


def stream_of(store: FileBlobs, **settings) -> ShardStream:
    defaults = {"chunk_tokens": 4, "shard_tokens": 1, "held_out_share": 0.0}
    return ShardStream(store, HiddenStatesConfig(**{**defaults, **settings}), 0, "rollout-0")


def piece(request: RolloutRequest, start: int, length: int = 4, rejections: int = 0) -> FeaturePiece:
    tokens = torch.arange(start, start + length)
    features = torch.ones(length, SIZE)
    return FeaturePiece(request, start, tokens, features, max(request.prompt.length, start), rejections)


def documents_of(store: FileBlobs, shards: list[HiddenShard]) -> list[Document]:
    return [document for shard in shards for document in read_shard(store, shard.blob)]


def test_states_leave_in_half_precision_while_the_answer_is_written(store: FileBlobs) -> None:
    stream, request = stream_of(store), engine_cases.request(0)
    (shard,) = stream.add(piece(request, 0, length=9))
    (document,) = documents_of(store, [shard])
    assert document.hidden.dtype == torch.bfloat16
    assert document.loss_mask.tolist() == 5 * [0] + 4 * [1]
    assert (shard.tokens, shard.documents, shard.policy_version) == (9, 1, 0)
    assert stream.end(request, [1, 2]) == [] and stream.flush() == [] and not stream.counts


def test_of_a_long_answer_half_leaves_at_once_and_half_where_drafts_were_rejected(store: FileBlobs) -> None:
    stream, request = stream_of(store, tokens_per_answer=16), engine_cases.request(0)
    rejections = [0, 0, 1, 3, 0, 0, 2, 0]
    early = [shard for n, count in enumerate(rejections) for shard in stream.add(piece(request, 4 * n, 4, count))]
    assert [each.position for each in documents_of(store, early)] == [0, 4]
    late = stream.end(request, [])
    assert sorted(each.position for each in documents_of(store, late)) == [12, 24]
    assert stream.counts == {"over_tokens_per_answer": 4}


def test_answers_are_sampled_by_their_name_and_evaluations_left_alone(store: FileBlobs) -> None:
    stream = stream_of(store, sample_rate=0.3)
    requests = [engine_cases.request(number) for number in range(100)]
    kept = {request.request_id for request in requests if stream.add(piece(request, 0))}
    assert 15 < len(kept) < 45
    again = stream_of(store, sample_rate=0.3)
    assert kept == {request.request_id for request in requests if again.add(piece(request, 0))}
    assert not stream_of(store).add(piece(requests[0].model_copy(update={"purpose": "eval"}), 0))
    for request in requests:
        stream.end(request, [])
    assert stream.counts == {"not_sampled": 100 - len(kept)}


def test_where_the_folder_is_full_what_is_worth_most_is_kept(store: FileBlobs) -> None:
    """Room for two of four pieces: those with rejections, and of the others the one farthest in its answer."""
    size = 4 * (SIZE * 2 + 5)
    stream = stream_of(store, shard_tokens=16, bytes_quota=int(2.5 * size / 1.25))
    shards: list[HiddenShard] = []
    for number, (start, rejections) in enumerate([(0, 0), (40, 0), (0, 0), (12, 3)]):
        shards += stream.add(piece(engine_cases.request(number), start, 4, rejections))
    assert sorted(each.position for each in documents_of(store, shards)) == [12, 40]
    assert stream.counts == {"over_bytes_quota": 2}
    assert stream.add(piece(engine_cases.request(9), 0, length=16)) == []  # the scheduler hasn't made room yet
    store.delete(shards[0].blob.name)
    assert stream.add(piece(engine_cases.request(10), 0)) == [] and len(stream.flush()) == 1


def test_what_cannot_be_written_is_counted_and_ends_nothing(store: FileBlobs) -> None:
    stream = stream_of(store)
    store.root.rmdir()
    assert stream.add(piece(engine_cases.request(0), 0)) == []
    assert stream.counts == {"not_written": 1}
    store.root.mkdir()
    assert len(stream.add(piece(engine_cases.request(0), 4))) == 1


def test_shards_say_what_they_are_worth(store: FileBlobs) -> None:
    def worth(start: int, rejections: int) -> float:
        (shard,) = stream_of(store).add(piece(engine_cases.request(0), start, 4, rejections))
        return shard.worth

    assert worth(0, 0) < worth(40, 0) < worth(400, 0)
    assert worth(40, 0) < worth(40, 1) < worth(40, 4)


def test_tokens_alone_are_the_whole_answer_or_the_way_to_a_part_of_it(store: FileBlobs) -> None:
    request, tokens = engine_cases.request(0), list(range(10, 40))
    sequence = [*request.prompt.tolist(), *tokens]
    (shard,) = stream_of(store, source="recompute").end(request, tokens)
    (whole,) = documents_of(store, [shard])
    assert whole.token_ids.tolist() == sequence[:-1] and whole.hidden.shape == (34, 0)
    assert whole.loss_mask.tolist() == 5 * [0] + 29 * [1]
    ends = set()
    for number in range(40):
        named = request.model_copy(update={"request_id": f"a{number}"})
        stream = stream_of(store, source="recompute", tokens_per_answer=6)
        (part,) = documents_of(store, stream.end(named, tokens))
        assert part.token_ids.tolist() == sequence[: len(part)]
        assert int(part.loss_mask.sum()) == int(part.loss_mask[-6:].sum()) == 6
        assert stream.counts == {"over_tokens_per_answer": 1}
        ends.add(len(part))
    assert min(ends) < 15 and max(ends) > 30  # any part


def test_rejections_are_counted_where_they_happened() -> None:
    """A drafter that is nearly always wrong, and one that is sometimes right: pieces say how often."""
    found = {}
    for name, drafter in (
        ("wrong", engine_cases.drafter(policy(), seed=3)),
        ("better", engine_cases.drafter(policy())),
    ):
        engine = engine_cases.engine(policy(), batch=4, depth=3)
        engine.set_drafter(drafter, 1)
        finished = decode_all(engine, [engine_cases.request(number, max_new_tokens=60) for number in range(4)])
        pieces = engine.take_pieces()
        for done in finished:
            counted = sum(each.rejections for each in pieces if each.request is done.request)
            assert 0 < counted <= done.draft.drafts
        found[name] = sum(each.rejections for each in pieces) / sum(len(done.tokens) for done in finished)
    assert found["better"] < found["wrong"]


def test_a_limit_that_holds_no_two_pieces_is_refused_with_the_remedy() -> None:
    content = {"policy": {"model": "none"}, "task": {"sources": [{"name": "chain_sum"}]}}
    with pytest.raises(ConfigError, match=r"must hold two pieces of chunk_tokens \(128\): raise it, or"):
        validate_config({**content, "hidden_states": {"tokens_per_answer": 200}})
    validate_config({**content, "hidden_states": {"tokens_per_answer": 200, "source": "recompute"}})
