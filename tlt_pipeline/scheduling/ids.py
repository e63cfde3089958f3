"""Names of requests, and the seeds that follow from them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tlt_pipeline.messages import Purpose

_PREFIX: dict[Purpose, str] = {"train": "s", "eval": "e"}
_PATTERN = re.compile(r"([se])(\d{5,})-p(\d{3,})-(\d{2,})")


@dataclass(frozen=True)
class RequestId:
    """`step` is the step of a training request, the policy version of an evaluation."""

    purpose: Purpose
    step: int
    prompt: int
    index: int

    @property
    def group(self) -> str:
        return f"{_PREFIX[self.purpose]}{self.step:05d}-p{self.prompt:03d}"

    def __str__(self) -> str:
        return f"{self.group}-{self.index:02d}"


def parse_request_id(text: str) -> RequestId | None:
    """None for a text that is no request id of ours."""
    found = _PATTERN.fullmatch(text)
    if found is None:
        return None
    step, prompt, index = (int(digits) for digits in found.groups()[1:])
    return RequestId("train" if found[1] == "s" else "eval", step, prompt, index)


def seed_of(run_seed: int, request_id: str) -> int:
    """First 63 bits of a hash: the same answer whoever writes it, and whenever."""
    digest = hashlib.sha256(f"{run_seed}/{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
