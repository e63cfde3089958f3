"""Peak memory of the drafter's loss, chunked and plain, each in a process of its own whose high-water mark is read.

    python -m tlt_services.bench_spot_loss KIND TOKENS THREADS     prints the bytes that loss and gradient took

Vocabulary and hidden size are SmolLM2's. Shapes: N = tokens, C = hidden size, V = vocabulary.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN = 49_152, 576
TOKENS, MOST_TOKENS = 4096, 32_768
"""Of the comparison: the plain loss takes about 5 GB; and of the chunked loss alone."""


class MeasurementFailed(RuntimeError):
    """The process that was to be measured failed; its last line."""


def measure_loss_memory(threads: int) -> dict[str, Any]:
    plain, chunked = _peak("plain", TOKENS, threads), _peak("chunked", TOKENS, threads)
    return {
        "ratio": plain / chunked,
        "plain_mb": plain / 1e6,
        "chunked_mb": chunked / 1e6,
        "chunked_most_mb": _peak("chunked", MOST_TOKENS, threads) / 1e6,
        "tokens": TOKENS,
        "most_tokens": MOST_TOKENS,
        "vocabulary": VOCABULARY,
        "hidden": HIDDEN,
    }


def _peak(kind: str, tokens: int, threads: int) -> int:
    command = [sys.executable, "-m", __name__, kind, str(tokens), str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise MeasurementFailed(f"the {kind} loss on {tokens} tokens failed: {(ran.stderr.splitlines() or ['?'])[-1]}")
    return int(ran.stdout)


def main(kind: str, tokens: int, threads: int) -> None:
    import torch
    import torch.nn.functional as F

    from tlt_pipeline.drafter.losses import FrozenParts, soft_cross_entropy
    from tlt_pipeline.models.decoder import Decoder, DecoderConfig

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = DecoderConfig(VOCABULARY, HIDDEN, 4, 0, 1, 1, 8, max_position_embeddings=8, tie_word_embeddings=True)
    frozen = FrozenParts.of(Decoder(config), 0)

    def run(count: int) -> None:
        predicted_NC, target_NC = inputs[0][:count].requires_grad_(), inputs[1][:count]
        weight_N = torch.ones(count)
        if kind == "chunked":
            loss = soft_cross_entropy(predicted_NC, target_NC, weight_N, frozen)
        else:
            with torch.no_grad():
                policy_NV = frozen.scores(frozen.norm(target_NC)).softmax(-1)
            scores_NV = frozen.scores(frozen.norm(predicted_NC))
            loss = (F.cross_entropy(scores_NV, policy_NV, reduction="none") * weight_N).sum()
        loss.backward()

    inputs = torch.randn(2, tokens, HIDDEN)
    run(8)  # libraries and their buffers
    before = _reset_peak()
    run(tokens)
    print(_status("VmHWM") - before)  # noqa: T201 the parent reads it


def _reset_peak() -> int:
    """The high-water mark begins anew; bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
