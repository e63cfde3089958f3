"""Signals as something to wait for: the launcher sleeps until a child ends, a key is pressed, or time is up."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wakeup:
    """While entered, SIGINT, SIGTERM and SIGHUP are counted in `stops` instead of ending the process, and any of
    them, or a child's end, cuts `wait` short. For the main thread."""

    def __init__(self) -> None:
        self.stops = 0
        self.stopped_by: signal.Signals | None = None
        self._near, self._far = socket.socketpair()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Wakeup:
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPPING, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._near.close()
        self._far.close()

    def wait(self, seconds: float) -> None:
        """Until a signal, at most `seconds`."""
        ready, _, _ = select.select([self._near], [], [], max(0.0, seconds))
        if ready:
            self._near.recv(4096)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in _STOPPING:
            self.stops += 1
            self.stopped_by = signal.Signals(number)
