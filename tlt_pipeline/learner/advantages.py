"""Group-normalised advantages: how much better an answer is than the others to the same prompt.

GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1): A_i = (r_i - mean(r)) / std(r) over the answers of one
prompt, the same for every token of an answer. Without the division (Dr. GRPO, arXiv 2503.20783) a prompt that
is almost always answered alike weighs no more than others. A group whose rewards are all equal says nothing
about which answer to prefer; it is counted and left out (DAPO, arXiv 2503.14476, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

STD_FLOOR = 1e-6


def group_advantages(rewards: Sequence[float], normalize_std: bool) -> list[float] | None:
    """Advantages of one group's answers, with mean 0 and (`normalize_std`) mean square 1; None where all
    rewards are equal, which includes a group of one."""
    if max(rewards) - min(rewards) <= STD_FLOOR:
        return None
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    if not normalize_std:
        return deviations
    std = math.sqrt(math.fsum(deviation**2 for deviation in deviations) / len(rewards))
    return [deviation / (std + STD_FLOOR) for deviation in deviations]


def assign_advantages(
    rewards: Mapping[str, float], groups: Mapping[str, str], normalize_std: bool
) -> tuple[dict[str, float], int]:
    """`rewards` and `groups` by request id -> (advantage by request id, groups left out).

    Answers of groups that are left out have no entry. The result does not depend on the order of the
    input."""
    members: dict[str, list[str]] = {}
    for request in sorted(rewards):
        members.setdefault(groups[request], []).append(request)
    advantages: dict[str, float] = {}
    left_out = 0
    for requests in members.values():
        found = group_advantages([rewards[request] for request in requests], normalize_std)
        if found is None:
            left_out += 1
        else:
            advantages.update(zip(requests, found, strict=True))
    return advantages, left_out
