"""One CPU thread for torch: tests share the cores with the processes they start, and "equal to the bit" is claimed for
one thread a slot (with more, attention's bits may depend on the batch; the engine's start-up check says so). Without a
GPU, Triton kernels are interpreted: decided when triton is first imported, so it is set before any test is."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
