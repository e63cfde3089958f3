"""One CPU thread for torch: tests share the cores with the processes they start, and "equal to the bit" is claimed for
one thread a slot (with more, attention's bits may depend on the batch; the engine's start-up check says so)."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
