"""Where a run's hidden-state shards lie."""

from __future__ import annotations

import shutil
from pathlib import Path

from tlt_pipeline.blobs.files import FileBlobs
from tlt_pipeline.blobs.redis_keys import LARGEST_BLOB, RedisBlobs
from tlt_pipeline.blobs.store import BlobStore
from tlt_pipeline.config import ConfigError, HiddenStatesConfig
from tlt_pipeline.rundir import RunDir

_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_SHARE = 0.5
"""Of Redis's memory, for shards: the queues need some too, and a string takes up to a quarter more than its length."""
_MB = 1 << 20


def open_hidden_states(config: HiddenStatesConfig, run: RunDir, redis_url: str) -> BlobStore:
    """The run's store of shards. Raises StorageError; BusError; ConfigError where Redis's memory is too small."""
    if config.store == "files":
        return FileBlobs(hidden_states_root(config, run))
    blobs = RedisBlobs(redis_url, run.run_id(), config.ttl_s)
    limit = blobs.memory_limit()
    if limit and config.bytes_limit > _MEMORY_SHARE * limit:
        fits = int(config.bytes_quota * _MEMORY_SHARE * limit / config.bytes_limit)
        raise ConfigError(
            f"hidden_states.bytes_quota ({config.bytes_quota}) is too much for a Redis with a maxmemory of "
            f"{limit // _MB} MB: lower it to {fits} or less, or raise that to {-(-2 * config.bytes_limit // _MB)} MB "
            "(redis.maxmemory_mb for a run's own server)"
        )
    return blobs


def hidden_states_root(config: HiddenStatesConfig, run: RunDir) -> Path:
    """The folder of shards as files: `hidden_states.root`; else a memory-backed folder where it is at least
    twice the quota (its size decides, not what is free: every process must come to the same folder); else the run
    directory. Outside the run directory each run has a folder of its own."""
    if config.root is not None:
        return Path(config.root) / run.run_id()
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).total >= 2 * config.bytes_quota:
        return _SHARED_MEMORY / f"tlt-{run.run_id()}"
    return run.blobs


def check_shard_size(config: HiddenStatesConfig, features: int) -> None:
    """`features`: numbers that a token's hidden states have. Raises ConfigError where most shards would be too large
    for the store. (A long prompt may still make one so: it is dropped and counted.)"""
    if config.store == "files" or config.source == "recompute":
        return
    tokens = config.shard_tokens + max(config.chunk_tokens, config.tokens_per_answer // 2)  # the last piece goes over
    most = LARGEST_BLOB // (2 * features)
    if tokens > most:
        size = 2 * features * tokens / _MB
        raise ConfigError(
            f"a shard of {tokens} tokens (hidden_states.shard_tokens and a piece) has {size:.1f} MB, through Redis go "
            f"{LARGEST_BLOB // _MB}: lower shard_tokens and chunk_tokens to {most} together, or set store to files, "
            "in a folder that all machines share (hidden_states.root)"
        )
