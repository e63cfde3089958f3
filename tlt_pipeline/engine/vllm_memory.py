"""Memory of a CPU tensor back to the system, without giving up the tensor."""

from __future__ import annotations

import ctypes
import mmap
import os

from torch import Tensor

_MADV_DONTNEED = 4


def release_pages(tensor: Tensor) -> int:
    """Bytes given back: the whole pages of the tensor's memory, which reads as zero from now on. Linux, CPU tensors."""
    if tensor.device.type != "cpu":
        return 0
    storage = tensor.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end <= start:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(start, end - start, _MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return end - start
