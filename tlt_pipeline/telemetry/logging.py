"""structlog to stderr: JSON lines, unless stderr is a terminal. Standard-library loggers take the same way.

Bind what a line is about with `structlog.contextvars.bound_contextvars(stream=…, msg_id=…, attempt=…)`.
Payloads are never logged, and passwords in URLs are cut out.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

_PASSWORD = re.compile(r"(://)[^/@\s]*@")
_SHOWN_OF_LIBRARIES = logging.WARNING


def configure_logging(level: str = "info", *, tty: bool | None = None) -> None:
    """`level`: debug, info, warning or error. `tty`: force the readable (True) or the JSON (False) form."""
    readable = sys.stderr.isatty() if tty is None else tty
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _hide_passwords,
    ]
    last: list[Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if readable
        else [
            structlog.processors.dict_tracebacks,
            _order,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # the one of now: a live table may redirect it
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, _SHOWN_OF_LIBRARIES))


def _hide_passwords(_logger: Any, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[key] = _PASSWORD.sub(r"\1***@", value)
    return event


def _order(_logger: Any, _method: str, event: EventDict) -> EventDict:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return {**first, **event}
