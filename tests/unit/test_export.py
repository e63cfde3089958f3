"""Exported EAGLE drafters: the round trip is exact, names and shapes are the table's, what can't be held is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tlt_pipeline.models.checkpoint import load_drafter, save_drafter
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, Rope, initialize
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_pipeline.models.drafter_files import shape_of
from tlt_pipeline.models.export import VLLM_ARCHITECTURE, export_drafter, import_drafter
from tlt_pipeline.models.export_layout import table_of
from tlt_pipeline.models.locate import ModelError

CONFIG = DecoderConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rope_theta=5000.0,
    tie_word_embeddings=True,
)
VARIANTS = {
    "llama": CONFIG,
    "qwen2": replace(CONFIG, qkv_bias=True, tie_word_embeddings=False),
    "qwen3": replace(CONFIG, qk_norm=True, head_dim=10),
}


def make(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> tuple[Decoder, EagleDrafter]:
    generator = torch.Generator().manual_seed(0)
    policy, drafter = Decoder(config), EagleDrafter(config)
    for model in (policy, drafter):
        initialize(model, generator)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy.to(dtype), drafter.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip_is_exact(tmp_path, config, dtype):
    policy, drafter = make(config, dtype)
    export_drafter(drafter, config, policy.norm.weight, tmp_path / "out", card="# card")
    back = import_drafter(tmp_path / "out", config, dtype)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name)), name
    assert torch.equal(back.rope.cos, Rope(drafter.config).cos)
    assert (tmp_path / "out" / "README.md").read_text() == "# card"


def test_a_draft_vocabulary_goes_along(tmp_path):
    policy, drafter = make(CONFIG)
    drafter.draft_ids = torch.tensor([0, 3, 4, 17, 60])
    export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["d2t"].tolist() == [0, 2, 2, 14, 56]
    assert stored["t2d"].nonzero().flatten().tolist() == [0, 3, 4, 17, 60]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == 5
    back = import_drafter(tmp_path / "out", CONFIG)
    assert back.draft_ids is not None and torch.equal(back.draft_ids, drafter.draft_ids)


def test_names_and_shapes_are_the_tables(tmp_path):
    policy, drafter = make(CONFIG)
    export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == table_of(shape_of(drafter), "plugin")
    assert stored["layers.0.self_attn.k_proj.weight"].shape == (12, 24)
    assert torch.equal(stored["norm.weight"], policy.norm.weight)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == [VLLM_ARCHITECTURE]
    assert content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3]
    assert (content["num_hidden_layers"], content["tie_word_embeddings"]) == (1, False)


def test_an_exported_drafter_is_a_start(tmp_path):
    policy, drafter = make(CONFIG)
    export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
    started = load_drafter(tmp_path / "out", CONFIG)
    assert torch.equal(started.fc.weight, drafter.fc.weight)
    save_drafter(started, tmp_path / "own")
    assert torch.equal(load_drafter(tmp_path / "own", CONFIG).layer.qkv.weight, drafter.layer.qkv.weight)


@pytest.mark.parametrize("format", ["sglang", "speculators"])
def test_formats_that_cannot_hold_it_are_refused(tmp_path, format):
    policy, drafter = make(CONFIG)
    with pytest.raises(ModelError, match="take --format vllm"):
        export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_a_tensor_too_many_is_refused(tmp_path):
    policy, drafter = make(CONFIG)
    drafter.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ModelError, match="no place for the drafter's extra"):
        export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("fc.weight"), "lack fc.weight"),
        (lambda state: state.update(midlayer=torch.zeros(2)), "has midlayer, which this drafter has no place for"),
        (lambda state: state.update({"norm.weight": torch.zeros(25)}), r"norm.weight is \(25,\)"),
    ],
)
def test_other_tensors_are_refused_on_the_way_back(tmp_path, damage, message):
    policy, drafter = make(CONFIG)
    export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    state = load_file(file)
    damage(state)
    save_file(state, file)
    with pytest.raises(ModelError, match=message):
        import_drafter(tmp_path / "out", CONFIG)


@pytest.mark.parametrize(
    ("change", "message"), [({"num_layers": 4}, "layers 3"), ({"vocab_size": 60}, "vocab_size 61")]
)
def test_another_policys_drafter_is_refused(tmp_path, change, message):
    policy, drafter = make(CONFIG)
    export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
    with pytest.raises(ModelError, match=message):
        import_drafter(tmp_path / "out", replace(CONFIG, **change))


def test_what_is_there_is_not_overwritten(tmp_path):
    policy, drafter = make(CONFIG)
    export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
    with pytest.raises(ModelError, match="is there already"):
        export_drafter(drafter, CONFIG, policy.norm.weight, tmp_path / "out")
