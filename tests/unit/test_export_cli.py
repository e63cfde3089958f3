"""`tlt export-drafter` and `tlt import-drafter`, from a drafter's folder to every format and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit import engine_cases as cases
from tlt_pipeline.models.checkpoint import save_decoder, save_drafter
from tlt_pipeline.models.decoder import Decoder, initialize
from tlt_pipeline.models.drafter import DrafterKind, drafter_from_policy
from tlt_pipeline.models.drafter_config import read_taps
from tlt_pipeline.models.eagle3_start import eagle3_from_policy
from tlt_services.cli import invoke


def prepare(folder: Path, layers: int, kind: DrafterKind) -> None:
    """A policy with a tokenizer in `policy`, its drafter in `own`."""
    policy = Decoder(replace(cases.policy().config, num_layers=layers))
    initialize(policy, torch.Generator().manual_seed(0), std=0.15)
    save_decoder(policy, folder / "policy", {"eos_token_id": 1, "pad_token_id": 0})
    cases.tokenizer().save(folder / "policy")
    ids = torch.arange(0, policy.config.vocab_size, 2)
    save_drafter(
        drafter_from_policy(policy) if kind == "eagle" else eagle3_from_policy(policy, (), ids), folder / "own"
    )
    noted = {"tokens_trained": 123, "policy": "some/policy", "acceptance_length": 4.5}
    (folder / "own" / "warmup.json").write_text(json.dumps(noted))


def call(folder: Path, command: str, source: str, out: str, *options: str) -> int:
    where = [command, str(folder / source), "--policy", str(folder / "policy"), "--out", str(folder / out)]
    return invoke([*where, *options])


@pytest.mark.parametrize(
    ("kind", "format", "serving"),
    [
        ("eagle3", "vllm", "an environment that has vLLM:"),
        ("eagle3", "sglang", "sglang.launch_server"),
        ("eagle3", "speculators", "an environment that has vLLM:"),
        ("eagle", "vllm", "vLLM and tlt-pipeline"),
    ],
)
def test_there_and_back(tmp_path, capfd, kind, format, serving) -> None:
    prepare(tmp_path, 8, kind)
    assert call(tmp_path, "export-drafter", "own", "out", "--format", format) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert serving in card and "123 tokens of answers that `some/policy` wrote" in card and "held-out answers" in card
    assert (tmp_path / "out" / "tokenizer.json").samefile(tmp_path / "policy" / "tokenizer.json")
    assert read_taps(tmp_path / "out", 8) == ((2, 4, 5) if kind == "eagle3" else ())
    assert call(tmp_path, "import-drafter", "out", "back") == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    assert call(tmp_path, "export-drafter", "own", "out", "--format", format) == 2
    assert "is there already" in capfd.readouterr().err


def test_a_copy_of_the_policys_embedding_is_held_against_it(tmp_path, capfd) -> None:
    prepare(tmp_path, 8, "eagle3")
    assert call(tmp_path, "export-drafter", "own", "out") == 0
    file = tmp_path / "out" / "model.safetensors"
    embedding = load_file(tmp_path / "policy" / "model.safetensors")["model.embed_tokens.weight"]
    save_file(load_file(file) | {"embed_tokens.weight": embedding.bfloat16().float()}, file)
    assert call(tmp_path, "import-drafter", "out", "back") == 2
    assert "another embedding than the policy" in capfd.readouterr().err
    save_file(load_file(file) | {"embed_tokens.weight": embedding}, file)
    assert call(tmp_path, "import-drafter", "out", "back") == 0


@pytest.mark.parametrize(
    ("layers", "kind", "format", "reason"),
    [
        (2, "eagle3", "vllm", "serving engines read each once"),
        (8, "eagle", "sglang", "take --format vllm"),
        (8, "eagle3", "gguf", "give one of vllm, sglang, speculators"),
    ],
)
def test_what_does_not_go_is_one_line(tmp_path, capfd, layers, kind, format, reason) -> None:
    prepare(tmp_path, layers, kind)
    assert call(tmp_path, "export-drafter", "own", "out", "--format", format) == 2
    said = capfd.readouterr().err.strip()
    assert reason in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_of_ours_needs_no_import(tmp_path, capfd) -> None:
    prepare(tmp_path, 2, "eagle3")
    assert call(tmp_path, "import-drafter", "own", "back") == 2
    assert "drafter.init takes it as it is" in capfd.readouterr().err
