"""What went wrong, in one line with the remedy, and the exit code that says whose it is.

2: what the user gave. 1: what went wrong. 3 (between a service and its supervisor only): the run can't go on,
and starting the process again would not help. 130: interrupted.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import cast

from tlt_pipeline.folders import NoSpace

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_FATAL = 3
EXIT_INTERRUPTED = 130
_OURS = ("tlt_pipeline.", "tlt_services.", "tlt_kernels.")
_REDIS_DOWN = ("ConnectionError", "TimeoutError", "BusyLoadingError")


class RunFatal(Exception):
    """The run can't go on: NaN in the loss, a policy that can't be loaded. The text is one line with the
    remedy."""


class Stopped(Exception):
    """The process was asked to stop while it waited; a clean end."""


@dataclass(frozen=True)
class Failure:
    """`expected`: the line says it all; otherwise a traceback is worth keeping."""

    code: int
    line: str
    expected: bool


def explain(error: BaseException, place: str | None = "--run-dir") -> Failure:
    """Any exception as one line and an exit code. `place`: what says where this command writes; None: nothing does."""
    error = _first_of(error)
    line = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return Failure(EXIT_INTERRUPTED, "interrupted", True)
    if isinstance(error, RunFatal):
        return Failure(EXIT_FATAL, line, True)
    if type(error).__module__.startswith(_OURS) and line:
        if isinstance(error, NoSpace) and place and line.endswith("free some"):  # a resumed run has its place
            line += f", or choose another place with {place}"
        return Failure(int(getattr(error, "exit_code", _code_of(error))), line, True)
    if isinstance(error, OSError):
        known = _explain_os(error, place)
        if known:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return Failure(EXIT_FATAL if full else EXIT_FAILED, known, True)
    if type(error).__module__.startswith("redis.") and type(error).__name__ in _REDIS_DOWN:
        return Failure(EXIT_FAILED, f"lost Redis ({line}): see that the server runs, then go on with --resume", True)
    name = type(error).__name__
    return Failure(EXIT_FAILED, f"unexpected {name}: {line}" if line else f"unexpected {name}", False)


def _first_of(error: BaseException) -> BaseException:
    """Of a group the one that says most: one of ours where there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    parts = cast(tuple[BaseException, ...], error.exceptions)  # pyright: ignore[reportUnknownMemberType]
    inner = [_first_of(part) for part in parts]
    return next((part for part in inner if type(part).__module__.startswith(_OURS)), inner[0])


def _code_of(error: BaseException) -> int:
    """Ours that are ValueErrors: the user's; storage trouble: a restart won't mend it."""
    if isinstance(error, ValueError):
        return EXIT_USER
    return EXIT_FATAL if isinstance(error, OSError) else EXIT_FAILED


def _explain_os(error: OSError, place: str | None) -> str | None:
    where = f" ({error.filename})" if error.filename else ""
    elsewhere = f", or choose another place with {place}" if place else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk{where}: free some{elsewhere}"
    if error.errno == errno.EADDRINUSE:
        return f"a port is taken ({error.strerror or error}): stop what uses it or set telemetry.metrics_port"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"not allowed to write or read{where}: see to its permissions{elsewhere}"
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG) and place == "--out":
        return f"no folder can be made{where} ({error.strerror}){elsewhere.replace(', or', ':')}"
    return None
