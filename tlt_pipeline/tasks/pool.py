"""Verifiers in processes of their own, off the decode path.

A verifier is foreign code: it may raise, hang or die, and so may the search for the answer with the user's regular
expression. Each of these is an answer that scores 0, with the reason; the process is replaced and the others go on.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from tlt_pipeline.config import FileSource, ReasoningGymSource, Source, TaskConfig
from tlt_pipeline.tasks.mix import labelled_sources
from tlt_pipeline.tasks.prompts import compile_pattern, extract_answer
from tlt_pipeline.tasks.verifiers import check_verifier, score_answer

_TRIES = 3
"""A process that dies between two tasks breaks the whole pool: a new one then scores the answer."""


@dataclass(frozen=True)
class Verdict:
    reward: float
    error: str | None = None
    """Why the verifier gave no score (the reward is 0 then); None where it did, or where the text has no
    answer."""


class VerifierPool:
    """`task.verify_workers` processes that score answers; they start with the pool, and reasoning-gym is
    imported in them alone. One pool serves any number of concurrent `score` calls of one event loop.

    Raises TaskError: a pattern without a group, a verifier that isn't installed."""

    def __init__(self, config: TaskConfig) -> None:
        compile_pattern(config.answer_pattern, "task.answer_pattern")
        self._sources = labelled_sources(config)
        for label, source in self._sources.items():
            if isinstance(source, FileSource):
                check_verifier(label, source.verifier)
        self._config = config
        self._asked: set[ProcessFuture[Verdict]] = set()
        self._pool = self._start()

    async def score(self, source: str, entry: str, text: str) -> Verdict:
        """Scores what the model wrote: the answer is looked for in `text`, none scores 0. Never raises for
        what a verifier does; cancelling the call stops its process."""
        reason = ""
        known = self._sources.get(source)
        if known is None:
            return Verdict(0.0, f"no task source is called {source!r}: the config has changed since it was asked")
        for _ in range(_TRIES):
            if not self._pool.active:
                self._pool = self._start()
            try:
                return await self._run(known, entry, text)
            except BrokenProcessPool as error:
                reason = str(error)
        return Verdict(0.0, f"the verifier processes don't stay alive: {reason}")

    def close(self) -> None:
        """Stops the processes; scores still awaited are cancelled."""
        for future in list(self._asked):
            future.cancel()  # the pool drops what it has not begun without telling who waits for it
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _run(self, source: Source, entry: str, text: str) -> Verdict:
        limit = self._config.verify_timeout_s
        arguments = (source, entry, text, self._config.answer_pattern)
        future = self._pool.schedule(_score, args=arguments, timeout=limit)
        self._asked.add(future)
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError:
            return Verdict(0.0, f"the verifier took longer than task.verify_timeout_s ({limit:g} s)")
        except ProcessExpired as error:
            return Verdict(0.0, f"the verifier's process died (exit code {error.exitcode})")
        finally:
            self._asked.discard(future)

    def _start(self) -> ProcessPool:
        gym = any(isinstance(source, ReasoningGymSource) for source in self._sources.values())
        pool = ProcessPool(
            max_workers=self._config.verify_workers,
            initializer=_prepare,
            initargs=(gym,),
            # Not fork: the caller has threads (torch's, the event loop's), and a fork copies their locks.
            context=multiprocessing.get_context("spawn"),
        )
        _ = pool.active  # starts the processes now, so that the first answers needn't wait for imports
        return pool


def _prepare(gym: bool) -> None:
    """Start of a pool process. Imports stand here, outside the time limit of a task."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    if gym:
        import_module("reasoning_gym")


def _follow_parent() -> None:
    """Ends this process when its parent has, however that ended, even while a verifier hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _score(source: Source, entry: str, text: str, pattern: str) -> Verdict:
    """One answer, in the pool's process."""
    try:
        answer = extract_answer(text, pattern)
        return Verdict(0.0 if answer is None else score_answer(source, answer, entry))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the reason is handed back and counted)
        text = " ".join(str(error).split())
        return Verdict(0.0, f"the verifier raised {type(error).__name__}{': ' if text else ''}{text}"[:500])
