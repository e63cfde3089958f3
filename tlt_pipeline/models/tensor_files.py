"""The safetensors files of a folder: what their headers say, and their tensors, one at a time. Headers are read without
torch, in a millisecond, and say whether a file is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_pipeline.models.locate import ModelError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_LONGEST_HEADER = 100_000_000
_IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Header:
    """Of one tensor. `dtype`: safetensors' name, such as BF16."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, Header]:
    """Of all tensors in the folder. Raises ModelError: no weights here, or files that are torn, locked or missing."""
    found: dict[str, Header] = {}
    name = ""
    try:
        for name in _file_names(folder):
            found.update(_read_header(folder / name))
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"{folder}: weights can't be read ({Path(str(error.filename)).name}: {error.strerror}): copy the folder "
            f"again, or see to its permissions"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{folder}: weights can't be read ({name} is torn): copy the folder again") from error
    return found


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.exists():
        if (folder / WEIGHTS).exists():
            return [WEIGHTS]
        raise ModelError(f"{folder} has neither {WEIGHTS} nor {INDEX}: save the model as safetensors")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if names and all(Path(name).name == name for name in names):
            return sorted(names)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ModelError(f"{index} is damaged (no weight_map of file names): copy the folder again")


def _read_header(path: Path) -> Iterator[tuple[str, Header]]:
    """As the format says: length of the header, header in JSON, bytes of the tensors without a gap."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _LONGEST_HEADER:
            raise ValueError(length)
        header: dict[str, Any] = json.loads(file.read(length))
        size = os.fstat(file.fileno()).st_size - 8 - length
    header.pop("__metadata__", None)
    if max((entry["data_offsets"][1] for entry in header.values()), default=0) != size:
        raise ValueError(size)
    for name, entry in header.items():
        yield name, Header(path.name, str(entry["dtype"]), tuple(map(int, entry["shape"])))


class TensorFiles:
    """The folder's tensors. Each is taken once, so that it shows what nothing reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headers = read_headers(folder)
        self._left = dict(self.headers)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> TensorFiles:
        from safetensors import SafetensorError, safe_open

        try:
            for name in sorted({header.file for header in self.headers.values()}):
                self._files[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise ModelError(f"{self.folder}: weights can't be read ({error}): copy the folder again") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def take(self, name: str) -> Tensor:
        if name not in self._left:
            raise ModelError(f"{self.folder}: the weights lack {name}: copy the model again, or fix config.json")
        tensor: Tensor = self._files[self._left.pop(name).file].get_tensor(name)
        return tensor

    def refuse_left_over(self, *, tied: bool) -> None:
        """Tensors that nothing reads mean that config.json tells of another model: wrong logits, silently."""
        ignored = (*_IGNORED, "lm_head.weight") if tied else _IGNORED
        unread = sorted(name for name in self._left if not name.endswith(ignored))
        if unread:
            raise ModelError(
                f"{self.folder}: config.json has no place for {len(unread)} tensors, such as {unread[0]}: "
                f"fix config.json (biases, norms, layers)"
            )
