"""Blobs as keys of a real Redis: the same interface as the files'; a server in trouble costs shards, not the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import torch

from tests.integration.conftest import StartServer, wait_until
from tests.unit import engine_cases
from tests.unit.drafter_cases import config, policy
from tlt_pipeline.blobs import (
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    BlobTooLarge,
    FileBlobs,
    RedisBlobs,
    check_shard_size,
    open_hidden_states,
    redis_keys,
)
from tlt_pipeline.bus import BusError, BusFull
from tlt_pipeline.bus.server import RedisServer
from tlt_pipeline.bus.streams import Keys
from tlt_pipeline.config import ConfigError, HiddenStatesConfig
from tlt_pipeline.drafter.buffer import DocumentBuffer
from tlt_pipeline.drafter.intake import ShardIntake
from tlt_pipeline.drafter.streaming import ShardStream
from tlt_pipeline.engine.results import FeaturePiece
from tlt_pipeline.messages import HiddenShard
from tlt_pipeline.rundir import prepare_run_dir

MB = 1 << 20


@pytest.fixture
def run_id() -> str:
    return f"blobs-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def store(redis_url: str, run_id: str) -> RedisBlobs:
    return RedisBlobs(redis_url, run_id, ttl_s=60.0)


@pytest.fixture(params=["files", "redis"])
def either(request: pytest.FixtureRequest, redis_url: str, run_id: str, tmp_path: Path) -> BlobStore:
    return FileBlobs(tmp_path / "blobs") if request.param == "files" else RedisBlobs(redis_url, run_id, ttl_s=60.0)


@contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    """The server is there, and doesn't answer."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


class TestBothStores:
    def test_reads_what_was_written(self, either: BlobStore) -> None:
        data = os.urandom(100_000)
        ref = either.write("b.safetensors", data)
        either.write("a", b"content")
        assert ref.size == len(data) and either.read(ref) == data
        assert either.names() == ["a", "b.safetensors"]
        assert either.bytes_used() == len(data) + 7

    def test_deleted_blob_is_missing(self, either: BlobStore) -> None:
        ref = either.write("a", b"content")
        either.delete("a")
        either.delete("a")
        with pytest.raises(BlobMissing, match="blob a is not in"):
            either.read(ref)
        assert either.names() == [] and either.bytes_used() == 0

    def test_rewritten_blob_fails_old_references(self, either: BlobStore) -> None:
        old, longer = either.write("a", b"first"), either.write("a", b"longer")
        with pytest.raises(BlobCorrupt, match="6 bytes"):
            either.read(old)
        new = either.write("a", b"other")
        assert either.read(new) == b"other" and either.bytes_used() == 5
        for wrong in (old, longer):
            with pytest.raises(BlobCorrupt):
                either.read(wrong)

    @pytest.mark.parametrize("name", ["../a", "", ".hidden", "a/b", "a\x00b", "a b", "x" * 300])
    def test_bad_names_are_refused(self, either: BlobStore, name: str) -> None:
        ref = either.write("a", b"content").model_copy(update={"name": name})
        with pytest.raises(BlobCorrupt, match="no blob name"):
            either.read(ref)
        for use in (lambda: either.write(name, b"content"), lambda: either.delete(name)):
            with pytest.raises(ValueError, match="no blob name"):
                use()

    def test_what_a_killed_writer_left_is_collected(self, either: BlobStore, redis_url: str, run_id: str) -> None:
        """Whole ones that nobody heard of, and the one that it was writing."""
        make = f"FileBlobs(Path({str(either.root)!r}))" if isinstance(either, FileBlobs) else ""
        make = make or f"RedisBlobs({redis_url!r}, {run_id!r}, 60.0)"
        script = f"""
import itertools
from pathlib import Path
from tlt_pipeline.blobs import FileBlobs, RedisBlobs
store = {make}
for number in itertools.count():
    store.write(f"of-the-dead-{{number}}", bytes(1 << 20))
"""
        heard = either.write("heard-of", b"content")
        writer = subprocess.Popen([sys.executable, "-c", script])
        try:
            asyncio.run(wait_until(lambda: len(either.names()) > 5, 60.0))
        finally:
            writer.kill()
            writer.wait()
        assert either.remove_unknown({heard.name}) == 0, "young ones may still be announced"
        left = len(either.names()) - 1
        assert either.remove_unknown({heard.name}, older_than_s=-1.0) >= left >= 5
        assert either.names() == ["heard-of"] and either.bytes_used() == 7
        assert either.read(heard) == b"content"


class TestInRedis:
    async def test_nothing_outlives_its_time(self, redis_url: str, run_id: str, raw: redis.Redis) -> None:
        store = RedisBlobs(redis_url, run_id, ttl_s=0.3)
        refs = [store.write(name, b"content") for name in ("a", "b")]
        raw.persist(Keys(run_id).blobs())  # the list of a run that goes on writing

        def missing() -> bool:
            try:
                return not store.read(refs[0])
            except BlobMissing:
                return True

        await wait_until(missing)
        await wait_until(lambda: not store.names())
        assert store.bytes_used() == 0
        assert raw.keys(f"*{run_id}*") == []
        store.write("c", b"content")
        await wait_until(lambda: not raw.keys(f"*{run_id}*"))  # the list of a run that is gone

    def test_of_its_run_alone(self, store: RedisBlobs, redis_url: str) -> None:
        ref = store.write("a", b"content")
        other = RedisBlobs(redis_url, f"other-{uuid.uuid4().hex[:8]}", 60.0)
        assert other.names() == [] and other.remove_unknown((), older_than_s=-1.0) == 0
        with pytest.raises(BlobMissing):
            other.read(ref)
        assert store.read(ref) == b"content"

    def test_ages_are_told_by_the_server(self, store: RedisBlobs, run_id: str, raw: redis.Redis) -> None:
        for name in ("old", "known", "young"):
            store.write(name, b"content")
        for name in ("old", "known"):
            raw.pexpire(Keys(run_id).blob(name), 20_000)  # 40 of its 60 s are over
        assert store.remove_unknown({"known"}, older_than_s=30.0) == 1
        assert store.names() == ["known", "young"]

    def test_another_content_is_corrupt(self, store: RedisBlobs, run_id: str, raw: redis.Redis) -> None:
        ref = store.write("a", b"content")
        for content in (b"CONTENT", b"conten"):
            raw.set(Keys(run_id).blob("a"), content)
            with pytest.raises(BlobCorrupt):
                store.read(ref)

    def test_a_key_of_another_kind_is_no_crash(self, store: RedisBlobs, run_id: str, raw: redis.Redis) -> None:
        ref = store.write("a", b"content")
        raw.delete(Keys(run_id).blob("a"))
        raw.lpush(Keys(run_id).blob("a"), "x")
        with pytest.raises(BusError, match=r"refuses a blob: .*wrong kind of value"):
            store.read(ref)
        raw.delete(Keys(run_id).blob("a"))

    def test_what_is_too_large_is_refused_with_the_remedy(self, store: RedisBlobs) -> None:
        store.write("fits", bytes(redis_keys.LARGEST_BLOB))
        with pytest.raises(BlobTooLarge, match=r"lower hidden_states\.shard_tokens, or set .*store to files"):
            store.write("large", bytes(redis_keys.LARGEST_BLOB + 1))
        assert store.names() == ["fits"]
        store.delete("fits")

    def test_the_quota_has_to_fit_the_server(self, start_server: StartServer, tmp_path: Path) -> None:
        run, server = prepare_run_dir(tmp_path / "run", "one"), start_server(maxmemory_mb=64)
        with pytest.raises(
            ConfigError, match=r"bytes_quota .* maxmemory of 64 MB: lower it to (\d+) or less"
        ) as refusal:
            open_hidden_states(HiddenStatesConfig(store="redis"), run, server.url)
        fits = int(str(refusal.value).split("lower it to ")[1].split()[0])
        assert 20 * MB < fits < 32 * MB
        open_hidden_states(HiddenStatesConfig(store="redis", bytes_quota=fits), run, server.url)
        with pytest.raises(ConfigError):
            open_hidden_states(HiddenStatesConfig(store="redis", bytes_quota=fits + MB), run, server.url)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set root to null, or store to files"):
        HiddenStatesConfig(store="redis", root="/shared")
    settings = HiddenStatesConfig(store="redis", shard_tokens=2048, chunk_tokens=128)
    check_shard_size(settings, 2048)
    with pytest.raises(
        ConfigError, match=r"2176 tokens .* has 59\.5 MB, through Redis go 16: lower .* to 585 together"
    ):
        check_shard_size(settings, 14336)
    check_shard_size(settings.model_copy(update={"source": "recompute"}), 14336)
    check_shard_size(HiddenStatesConfig(shard_tokens=1 << 20), 14336)


# --- a server in trouble ------------------------------------------------------------------------------------------


def stream_into(store: BlobStore) -> ShardStream:
    return ShardStream(store, HiddenStatesConfig(shard_tokens=1, held_out_share=0.0), 0, "rollout-0")


def add(stream: ShardStream, number: int, length: int = 4) -> list[HiddenShard]:
    request, size = engine_cases.request(number), policy().config.hidden_size
    tokens = torch.arange(length) % 30
    return stream.add(FeaturePiece(request, 0, tokens, torch.ones(length, size), 0, 0))


def intake_from(store: BlobStore) -> ShardIntake:
    buffer = DocumentBuffer(keep_steps=2, byte_limit=1 << 30, held_out_share=0.1, seed=0)
    return ShardIntake(store, buffer, policy().config, config(), lambda _: policy())


def test_expired_and_changed_shards_are_counted_and_the_others_trained_on(
    store: RedisBlobs, run_id: str, raw: redis.Redis
) -> None:
    stream, intake = stream_into(store), intake_from(store)
    shards = [shard for number in range(4) for shard in add(stream, number)]
    raw.pexpire(Keys(run_id).blob(shards[0].blob.name), 0)
    key = Keys(run_id).blob(shards[1].blob.name)
    raw.setrange(key, shards[1].blob.size - 1, b"?")
    assert intake.take(shards) == []
    assert intake.counts == {"missing": 1, "corrupt": 1, "read": 2}


def test_a_full_server_costs_shards_and_takes_them_again_later(start_server: StartServer, run_id: str) -> None:
    server = start_server(maxmemory_mb=16)
    store = RedisBlobs(server.url, run_id, ttl_s=60.0)
    stream = stream_into(store)
    (first,) = add(stream, 0)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        assert add(stream, 1) == [] and add(stream, 2) == []
        assert stream.counts == {"not_written": 2}
        with pytest.raises(BusFull, match=r"at its maxmemory: raise it .* or lower hidden_states\.bytes_quota"):
            store.write("a", b"content")
        assert store.names() == [first.blob.name]
        assert intake_from(store).take([first]) == []  # reading and deleting go on
        store.delete(first.blob.name)
        client.config_set("maxmemory", 16 * MB)
    (fourth,) = add(stream, 3)
    assert store.names() == [fourth.blob.name]


def test_a_server_that_does_not_answer_is_waited_for_once(
    start_server: StartServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_keys, "_REST_S", 60.0)
    server = start_server()
    store = RedisBlobs(server.url, run_id, ttl_s=60.0)
    stream = stream_into(store)
    (first,) = add(stream, 0)
    intake = intake_from(store)
    with frozen(server):
        began = time.monotonic()
        assert add(stream, 1) == []
        waited = time.monotonic() - began
        for number in range(2, 100):
            assert add(stream, number) == []
        rest = time.monotonic() - began - waited
        assert intake.take([first]) == []
    assert 0.5 < waited < 3.0 and rest < 1.0
    assert stream.counts == {"not_written": 99} and intake.counts == {"unreachable": 1}
    monkeypatch.setattr(store, "_rest_until", 0.0)
    assert len(add(stream, 100)) == 1


async def test_a_server_that_was_killed_has_its_shards_again(start_server: StartServer, run_id: str) -> None:
    server = start_server()
    store = RedisBlobs(server.url, run_id, ttl_s=60.0)
    ref = store.write("a", b"content")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await wait_until(server.revive)
    assert store.read(ref) == b"content" and store.names() == ["a"]
