"""Whether this container's service is at work: it has spoken to Redis lately, which every service does at least once
a second, also while it computes. Asks Redis, so it holds for all four services, whatever they are doing.

Exit code 0 or 1, with the reason on stdout (`docker inspect` keeps it).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import redis

LONGEST_SILENCE_S = 30


def examine(url: str) -> str | None:
    """What is wrong, in one line; None where all is well."""
    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, decode_responses=True) as client:
            own_id = str(client.client_id())
            clients: Any = client.client_list()
    except redis.RedisError as error:
        return f"Redis can't be asked: {error}"
    host = next(_host_of(entry) for entry in clients if entry["id"] == own_id)
    silences = [int(entry["idle"]) for entry in clients if entry["id"] != own_id and _host_of(entry) == host]
    if not silences:
        return "the service is not connected to Redis: see its log for what it waits for"
    if min(silences) > LONGEST_SILENCE_S:
        return f"the service has said nothing to Redis for {min(silences)} s"
    return None


def _host_of(entry: dict[str, str]) -> str:
    return entry["addr"].rpartition(":")[0]


if __name__ == "__main__":
    trouble = examine(os.environ["REDIS_URL"])
    print(trouble or "ok")  # noqa: T201
    sys.exit(1 if trouble else 0)
