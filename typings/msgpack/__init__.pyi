"""What this project uses of msgpack, which ships no types."""

from collections.abc import Callable
from typing import Any

class UnpackException(Exception): ...

def packb(o: Any, *, use_bin_type: bool = True, default: Callable[[Any], Any] | None = None) -> Any: ...
def unpackb(
    packed: bytes,
    *,
    raw: bool = False,
    strict_map_key: bool = True,
    timestamp: int = 0,
    max_ext_len: int = -1,
    max_str_len: int = -1,
    max_bin_len: int = -1,
    max_array_len: int = -1,
    max_map_len: int = -1,
) -> Any: ...
