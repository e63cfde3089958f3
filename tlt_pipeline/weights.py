"""Versioned weight sets of a run: written whole or not at all, never changed, checked when loaded (design
5.6).

    <root>/policy/v000003/    a Hugging Face folder with its tokenizer, which transformers loads
    <root>/drafter/v000001/   the drafter's trainable tensors and a config.json

Beside the files stands `set.json`: what WeightsPublished says, with the size and SHA-256 of each file. A
set is written under a temporary name, synced, and renamed into place. The hash in WeightsPublished is that
of the list of file hashes, so a load compares every byte with what was published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tlt_pipeline.config import RunConfig
from tlt_pipeline.folders import Digest, combine, digest, draft_folder, put_in_place, remove_folder, sweep
from tlt_pipeline.messages import ModelKind, WeightsPublished
from tlt_pipeline.models.checkpoint import load_decoder, load_drafter, save_decoder, save_drafter
from tlt_pipeline.models.decoder import Decoder, DecoderConfig
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tokenizer import Tokenizer

_MANIFEST = "set.json"


class WeightsError(RuntimeError):
    """A weight set that can't be written or isn't what was published; one line with the remedy."""


class WeightsMissing(WeightsError):
    """No such version here (any more)."""


class WeightStore:
    """The weight sets below `root`. Any number of processes may read and write; each version has one
    writer."""

    def __init__(self, root: Path, keep: int) -> None:
        """`keep`: so many newest versions of each model stay on disk, at least one."""
        self.root = Path(root)
        self.keep = max(1, keep)

    @classmethod
    def of_run(cls, run_dir: Path, config: RunConfig) -> WeightStore:
        """The run's store; keeps at least the versions that requests may still ask for."""
        return cls(run_dir / "weights", max(config.weights.keep, config.max_staleness + 2))

    def write_policy(
        self,
        version: int,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        parent: int,
        step: int,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
        dtype: torch.dtype | None = None,
    ) -> WeightsPublished:
        """Writes version `version`, trained from `parent` in step `step`, in `dtype` (the model's own if
        None).

        An equal set that is there already is left as it is and its message returned (a step repeated after a
        crash). Raises WeightsError: another set has this version; NoSpace."""
        ends = list(tokenizer.eos_ids)
        known = {
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": tokenizer.pad_id,
        }

        def write(folder: Path) -> None:
            save_decoder(model, folder, known, dtype=dtype)
            tokenizer.save(folder)

        return self._publish(
            write,
            model="policy",
            version=version,
            parent=parent,
            policy_version=version,
            step=step,
            metrics=dict(metrics or {}),
            final=final,
        )

    def write_drafter(
        self,
        version: int,
        drafter: Drafter,
        *,
        parent: int,
        policy_version: int,
        step: int,
        metrics: Mapping[str, float] | None = None,
    ) -> WeightsPublished:
        """Writes the drafter's trainable tensors; `policy_version` is the policy whose states it learned
        from."""
        return self._publish(
            lambda folder: save_drafter(drafter, folder),
            model="drafter",
            version=version,
            parent=parent,
            policy_version=policy_version,
            step=step,
            metrics=dict(metrics or {}),
        )

    def load_policy(
        self,
        ref: WeightsPublished | int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Decoder:
        """Raises WeightsMissing if the version was pruned, WeightsError if a byte isn't what was
        published."""
        with self._checked("policy", ref) as folder:
            return load_decoder(folder, dtype, device)

    def load_drafter(
        self,
        ref: WeightsPublished | int,
        policy_config: DecoderConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Drafter:
        """As load_policy; ModelError if the set is for another policy or carries one of its frozen
        tensors."""
        with self._checked("drafter", ref) as folder:
            return load_drafter(folder, policy_config, dtype, device)

    @contextmanager
    def opened(self, model: ModelKind, ref: WeightsPublished | int) -> Generator[Path]:
        """The folder of a set whose bytes are what was published. Raises as load_policy."""
        with self._checked(model, ref) as folder:
            yield folder

    def folder(self, model: ModelKind, version: int) -> Path:
        return self.root / _path(model, version)

    def versions(self, model: ModelKind) -> list[int]:
        """What is on disk, ascending."""
        found = (self.root / model).glob("v[0-9]*")
        return sorted(int(path.name[1:]) for path in found if path.name[1:].isdigit())

    def find(self, model: ModelKind, version: int) -> WeightsPublished:
        """What was published as this version. Raises WeightsMissing."""
        return self._read(model, version)[0]

    def latest(self, model: ModelKind) -> WeightsPublished | None:
        versions = self.versions(model)
        return self.find(model, versions[-1]) if versions else None

    def prune(self, model: ModelKind) -> list[int]:
        """Removes all but the `keep` newest versions; those removed. Every write does it. Who has a removed
        set loaded keeps it."""
        gone = self.versions(model)[: -self.keep]
        for version in gone:
            remove_folder(self.folder(model, version))
        sweep(self.root / model)
        return gone

    def _publish(
        self, write: Callable[[Path], None], *, model: ModelKind, version: int, **facts: Any
    ) -> WeightsPublished:
        target = self.folder(model, version)
        with draft_folder(target) as folder:
            write(folder)
            files = digest(folder, _MANIFEST)
            message = WeightsPublished(
                model=model,
                version=version,
                path=_path(model, version),
                size=sum(size for size, _ in files.values()),
                sha256=combine(files),
                **facts,
            )
            content = {"published": message.model_dump(mode="json"), "files": files}
            (folder / _MANIFEST).write_text(json.dumps(content, indent=2) + "\n")
            if not put_in_place(folder, target):
                message = self._same_there(message)
        self.prune(model)
        return message

    def _same_there(self, message: WeightsPublished) -> WeightsPublished:
        there = self.find(message.model, message.version)
        if there.sha256 == message.sha256:
            return there
        raise WeightsError(
            f"{self.root / message.path} holds another {message.model} version {message.version}, and "
            f"versions never change: go on from it (--resume), or start in a new run directory"
        )

    @contextmanager
    def _checked(self, model: ModelKind, ref: WeightsPublished | int) -> Generator[Path]:
        version = ref if isinstance(ref, int) else ref.version
        published, files = self._read(model, version)
        folder = self.folder(model, version)
        try:
            same = _digest(folder) == files and published.sha256 == combine(files)
            if not isinstance(ref, int):
                same = same and (ref.model, ref.sha256) == (model, published.sha256)
            if not same:
                raise WeightsError(
                    f"{folder} is not what was published as {model} version {version} (its hash differs): "
                    f"remove the folder and go on from an older version"
                )
            yield folder
        except (FileNotFoundError, ModelError) as error:
            if folder.exists():
                raise
            raise self._missing(model, version) from error  # pruned while it was read

    def _read(self, model: ModelKind, version: int) -> tuple[WeightsPublished, dict[str, tuple[int, str]]]:
        manifest = self.folder(model, version) / _MANIFEST
        try:
            content = json.loads(manifest.read_bytes())
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
            return WeightsPublished.model_validate(content["published"]), files
        except FileNotFoundError as error:
            raise self._missing(model, version) from error
        except OSError as error:
            raise _unreadable(manifest, error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{manifest} is damaged: remove its folder, go on from an older version") from error

    def _missing(self, model: ModelKind, version: int) -> WeightsMissing:
        kept = self.versions(model)
        have = f"kept are {kept[0]} to {kept[-1]}" if kept else "there is none at all"
        return WeightsMissing(
            f"{model} version {version} is not in {self.root}; {have}: raise weights.keep to keep more"
        )


def _path(model: ModelKind, version: int) -> str:
    return f"{model}/v{version:06d}"


def _digest(folder: Path) -> Digest:
    try:
        return digest(folder, _MANIFEST)
    except FileNotFoundError:
        raise  # pruned while it was read
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from error


def _unreadable(path: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"{path} can't be read ({error.strerror}): see to its permissions, or remove its folder and go on from an "
        f"older version"
    )
