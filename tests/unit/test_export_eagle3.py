"""EAGLE-3 drafters in the public formats: the engines compute what ours computes, the way back is exact, and folders
that aren't ours are read or refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit import engine_cases as cases
from tests.unit import format_cases
from tests.unit.drafter_cases import one_thread  # noqa: F401
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.models.checkpoint import load_drafter, save_decoder, save_drafter
from tlt_pipeline.models.decoder import CausalAttention, Decoder, Ops, Rope, initialize
from tlt_pipeline.models.drafter_files import shape_of
from tlt_pipeline.models.eagle3 import Eagle3Drafter, default_taps
from tlt_pipeline.models.eagle3_start import eagle3_from_policy
from tlt_pipeline.models.export import export_drafter, import_drafter
from tlt_pipeline.models.export_layout import table_of
from tlt_pipeline.models.locate import ModelError

FORMATS = ("vllm", "sglang", "speculators")
PREFIX = {"vllm": "midlayer.", "sglang": "midlayer.", "speculators": "layers.0."}
IDS = torch.tensor([0, 3, 4, 17, 30, 31, 40])
AUX = "eagle_aux_hidden_state_layer_ids"


def policy(family: str = "llama", layers: int = 8) -> Decoder:
    small = replace(cases.policy(family).config, num_layers=layers)
    made = Decoder(small)
    initialize(made, torch.Generator().manual_seed(1), std=0.2)
    return made


def drafter(model: Decoder, *, ids: torch.Tensor | None = IDS, first: bool = False) -> Eagle3Drafter:
    size = model.config.vocab_size if ids is None else len(ids)
    made = Eagle3Drafter(model.config, default_taps(model.config.num_layers), size, None, first)
    made.draft_ids = ids
    generator = torch.Generator().manual_seed(2)
    initialize(made, generator, std=0.2)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made.to(model.embed.weight)


def export(made: Eagle3Drafter, model: Decoder, folder: Path, format: str = "vllm") -> Path:
    export_drafter(made, model.config, model.norm.weight, folder, format, tokenizer=folder.parent)  # type: ignore[arg-type]
    return folder


# --- what the engines compute -----------------------------------------------------------------------------------------


@torch.no_grad()
def ours(made: Eagle3Drafter, model: Decoder, tokens: torch.Tensor, depth: int) -> tuple[list[torch.Tensor], list[int]]:
    """Drafted by the model itself, each step over the whole text again."""
    last = len(tokens) - 1
    positions = torch.arange(len(tokens))
    features = model.hidden(tokens[None], positions[None], Ops(CausalAttention()), made.taps)
    read, hidden = list(tokens[1:]), made.fuse(features)[0, :-1]
    logits, drafted = [], []
    for _ in range(depth):
        given = made(
            model.embed(torch.stack(read))[None], hidden[None], torch.arange(len(read))[None], Ops(CausalAttention())
        )[0]
        scores = made.own_head(made.own_norm(given[-1]))
        token = scores.argmax() if made.draft_ids is None else made.draft_ids[scores.argmax()]
        logits.append(scores)
        drafted.append(int(token))
        read, hidden = [*read, token], torch.cat([hidden, given[-1:]])
    assert len(read) == last + depth
    return logits, drafted


@pytest.mark.parametrize("first", [False, True], ids=["residual", "normed residual"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", FORMATS)
def test_engines_compute_from_the_folder_what_the_model_does(tmp_path, format, family, first) -> None:
    model = policy(family)
    if first and format == "sglang":
        with pytest.raises(ModelError, match="no norm_before_residual"):
            export(drafter(model, first=True), model, tmp_path / "out", format)
        return
    made = drafter(model, first=first)
    save_decoder(model, tmp_path / "policy")
    folder = format_cases.Folder.read(export(made, model, tmp_path / "out", format))
    theirs = format_cases.Folder.read(tmp_path / "policy")
    tokens = torch.randint(2, 40, (17,), generator=torch.Generator().manual_seed(3))
    ids = format_cases.aux_ids(folder.config, format, model.config.num_layers)
    assert ids == list(made.taps) == [2, 4, 5]
    drafting = format_cases.Drafting(folder, theirs, PREFIX[format])
    logits, drafted = drafting.propose(tokens, format_cases.policy_states(theirs, tokens, ids), 4)
    wanted_logits, wanted = ours(made, model, tokens, 4)
    assert drafted == wanted
    assert len(set(drafted)) > 1, "or nothing was compared"
    for one, other in zip(logits, wanted_logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_wrong_layer_or_residual_would_show(tmp_path) -> None:
    """The comparison above is sharp: what the traps are about changes the scores."""
    model = policy()
    made = drafter(model)
    save_decoder(model, tmp_path / "policy")
    folder = format_cases.Folder.read(export(made, model, tmp_path / "out"))
    theirs = format_cases.Folder.read(tmp_path / "policy")
    tokens = torch.arange(3, 20)
    wanted = ours(made, model, tokens, 2)[0]
    right = list(made.taps)
    for ids, change in ((right, {"norm_before_residual": True}), ([each - 1 for each in right], {}), (right, None)):
        changed = format_cases.Folder(folder.config | (change or {}), folder.tensors)
        drafting = format_cases.Drafting(changed, theirs, "midlayer.")
        logits, _ = drafting.propose(tokens, format_cases.policy_states(theirs, tokens, ids), 2)
        assert torch.allclose(logits[0], wanted[0], rtol=1e-4, atol=1e-4) == (change is None)


# --- the way back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_way_back_is_exact_and_drafts_the_same(tmp_path, format, family, dtype) -> None:
    model = policy(family).to(dtype)
    made = eagle3_from_policy(model, (), IDS)
    with torch.no_grad():
        made.own_norm.weight.mul_(1.25)
    export(made, model, tmp_path / "out", format)
    back = import_drafter(tmp_path / "out", model.config, dtype)
    assert shape_of(back) == shape_of(made)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name)), name
    assert back.draft_ids is not None and torch.equal(back.draft_ids, IDS)
    assert torch.equal(back.rope.cos, Rope(made.config).cos)


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_what_came_back_drafts_the_same(tmp_path, format) -> None:
    model = policy()
    made = eagle3_from_policy(model, (), IDS)
    told = []
    for each in (made, load_drafter(export(made, model, tmp_path / "out", format), model.config)):
        engine = cases.engine(model, batch=4)
        engine.set_drafter(each, 1)
        finished = decode_all(engine, [cases.request(number) for number in range(4)])
        told.append([(done.tokens, done.draft.drafts, done.draft.accepted_by_position) for done in finished])
    assert told[0] == told[1]
    assert sum(drafts for _, drafts, _ in told[0]) > 0


def test_a_whole_vocabulary_has_no_map(tmp_path) -> None:
    """vLLM has no place for one where the vocabularies are of one size."""
    model = policy()
    for number, ids in enumerate((None, torch.arange(model.config.vocab_size))):
        made = drafter(model, ids=ids)
        stored = load_file(export(made, model, tmp_path / str(number)) / "model.safetensors")
        assert not {"d2t", "t2d"} & stored.keys()
        assert import_drafter(tmp_path / str(number), model.config).draft_ids is None


@pytest.mark.parametrize("format", FORMATS)
def test_names_shapes_and_maps_are_the_formats(tmp_path, format) -> None:
    model = policy()
    made = drafter(model)
    stored = load_file(export(made, model, tmp_path / "out", format) / "model.safetensors")
    style = "speculators" if format == "speculators" else "flat"
    assert {name: tuple(each.shape) for name, each in stored.items()} == table_of(shape_of(made), style, len(IDS))
    assert stored.keys() == {
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
        *(f"{PREFIX[format]}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"{PREFIX[format]}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{PREFIX[format]}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    assert stored["d2t"].dtype == torch.int64 and stored["d2t"].tolist() == [0, 2, 2, 14, 26, 26, 34]
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero().flatten().tolist() == IDS.tolist()
    assert stored["fc.weight"].shape == (64, 192) and stored[f"{PREFIX[format]}self_attn.k_proj.weight"].shape == (
        32,
        128,
    )


def test_a_flat_folder_says_to_both_engines_which_layers(tmp_path) -> None:
    model = policy()
    content = json.loads((export(drafter(model), model, tmp_path / "out") / "config.json").read_text())
    assert (content["architectures"], content["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (content[AUX], content["eagle_config"][AUX]) == ([2, 4, 5], [1, 3, 4])
    assert (content["num_hidden_layers"], content["draft_vocab_size"], content["tie_word_embeddings"]) == (1, 7, False)
    assert (content["norm_before_residual"], content["target_hidden_size"]) == (False, 64)


def test_the_speculators_config_has_their_fields(tmp_path) -> None:
    model = policy("qwen2")
    content = json.loads((export(drafter(model), model, tmp_path / "out", "speculators") / "config.json").read_text())
    assert (content["architectures"], content["speculators_model_type"]) == (["Eagle3Speculator"], "eagle3")
    assert "model_type" not in content, "by which vLLM knows the format"
    assert content["speculators_config"]["verifier"] == {
        "name_or_path": str(tmp_path),
        "architectures": ["Qwen2ForCausalLM"],
    }
    assert content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert content["transformer_layer_config"]["model_type"] == "llama"
    assert content["norm_before_residual"] is False and content[AUX] == [2, 4, 5]


@pytest.mark.parametrize(
    ("layers", "taps", "format", "reason"),
    [
        (2, None, "vllm", "reads the policy's layers"),
        (3, None, "sglang", "can't hand over the input of layer 0"),
        (4, (1, 2), "speculators", "it has three hidden states"),
        (4, (2, 1, 3), "vllm", "in ascending order"),
    ],
)
def test_layers_that_an_engine_cannot_hand_over_are_refused(tmp_path, layers, taps, format, reason) -> None:
    model = policy(layers=layers)
    made = Eagle3Drafter(model.config, taps or default_taps(layers), model.config.vocab_size)
    with pytest.raises(ModelError, match=reason):
        export(made, model, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


# --- folders of others ------------------------------------------------------------------------------------------------


def edit(folder: Path, change) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def weights(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def as_from_elsewhere(content) -> None:
    """What a training of SpecForge leaves behind."""
    for key in ("tlt_drafter", "num_aux_hidden_states", "target_hidden_size", "norm_before_residual", AUX):
        content.pop(key, None)


def test_a_specforge_folder_is_a_start(tmp_path) -> None:
    model = policy()
    made = drafter(model)
    folder = export(made, model, tmp_path / "out")
    edit(folder, as_from_elsewhere)
    begun = load_drafter(folder, model.config)
    assert isinstance(begun, Eagle3Drafter) and begun.taps == (2, 4, 5), "SGLang's ids name outputs"
    edit(folder, lambda content: content.pop("eagle_config"))
    begun = load_drafter(folder, model.config)
    assert begun.taps == (2, 4, 5), "what all read where nothing is said"
    assert torch.equal(begun.get_parameter("layer.qkv.weight"), made.layer.qkv.weight)


def test_a_start_may_have_other_dimensions_than_the_policy(tmp_path) -> None:
    model = policy()
    other = replace(
        drafter(model).config, intermediate_size=40, num_heads=8, num_kv_heads=4, head_dim=12, rope_theta=777.0
    )
    made = Eagle3Drafter(model.config, (2, 4, 5), 7, other, norm_before_residual=True)
    made.draft_ids = IDS
    initialize(made, torch.Generator().manual_seed(5), std=0.1)
    begun = load_drafter(export(made, model, tmp_path / "out"), model.config)
    assert shape_of(begun) == shape_of(made)
    save_drafter(begun, tmp_path / "own")
    own = load_drafter(tmp_path / "own", model.config)
    assert shape_of(own) == shape_of(made)
    assert all(torch.equal(own.get_parameter(name), each) for name, each in made.named_parameters())
    engine = cases.engine(model, batch=4)
    plain = [done.tokens for done in decode_all(engine, [cases.request(number) for number in range(4)])]
    engine.set_drafter(own, 1)
    assert [done.tokens for done in decode_all(engine, [cases.request(number) for number in range(4)])] == plain


def test_an_embedding_that_is_the_policys_is_no_obstacle(tmp_path) -> None:
    model = policy()
    folder = export(drafter(model), model, tmp_path / "out")
    weights(folder, lambda state: state.update({"embed_tokens.weight": model.embed.weight.detach().clone()}))
    with pytest.raises(ModelError, match="tlt import-drafter"):
        load_drafter(folder, model.config)
    assert import_drafter(folder, model.config, embedding_VC=model.embed.weight.detach())
    with pytest.raises(ModelError, match="another embedding than the policy"):
        import_drafter(folder, model.config, embedding_VC=2 * model.embed.weight.detach())


CONFIG_DAMAGE = [
    (lambda content: content.clear(), "holds no drafter"),
    (lambda content: content.pop("hidden_size"), "lacks 'hidden_size'"),
    (lambda content: content.update(hidden_size="wide"), "hidden_size|wrong kind"),
    (lambda content: content.update(num_attention_heads=0), "wrong kind|num_heads can't be 0"),
    (lambda content: content.update(intermediate_size=-3), "intermediate_size can't be -3"),
    (lambda content: content.update(model_type=["llama"]), "wrong kind|not supported"),
    (lambda content: content.update(rope_parameters=[1]), "wrong kind"),
    (lambda content: content.update(eagle_config=7), "eagle_config is no JSON object"),
    (lambda content: content.update({AUX: "2,4,5"}), "must be a list of layers"),
    (lambda content: content.update({AUX: [2, 4, 8]}), "layers of the policy, below 8"),
    (lambda content: content.update({AUX: [4, 2, 5]}), "must ascend"),
    (lambda content: content.update({AUX: [2, 4]}), "fc.weight is"),
    (lambda content: content.update(tlt_drafter={}), "lacks 'tlt_drafter.policy.num_hidden_layers'"),
    (lambda content: content.update(tlt_drafter={"policy": {"num_hidden_layers": 9}}), "layers 9, not 8"),
    (lambda content: content.update(draft_vocab_size=0), "draft_vocab_size must be"),
    (lambda content: content.update(draft_vocab_size=6), "6 rows for 7 tokens"),
    (lambda content: content.update(vocab_size=99), "vocab_size 99, not"),
    (lambda content: content.update(num_hidden_layers=2), "num_layers 2, not 1"),
    (lambda content: content.update(norm_before_fc=True), "norm_before_fc isn't supported"),
    (lambda content: content.update(attention_bias=True), "qkv_bias isn't supported"),
    (lambda content: content.update(target_hidden_size=32), "hidden_size 32, not 64"),
    (lambda content: content["eagle_config"].update(use_aux_hidden_state=False), "without auxiliary states"),
    (lambda content: content.update(speculators_model_type="dflash"), "'dflash' isn't supported"),
    (lambda content: content.update(speculators_model_type="eagle3"), "lacks 'transformer_layer_config'"),
    (
        lambda content: content.update(speculators_model_type="eagle3", transformer_layer_config=[]),
        "no JSON object",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), CONFIG_DAMAGE, ids=[reason for _, reason in CONFIG_DAMAGE])
def test_a_damaged_config_is_one_line(tmp_path, damage, reason) -> None:
    model = policy()
    folder = export(drafter(model), model, tmp_path / "out")
    edit(folder, damage)
    with pytest.raises(ModelError, match=reason) as caught:
        load_drafter(folder, model.config)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_speculators_folder_must_say_where_its_residual_begins(tmp_path) -> None:
    model = policy()
    folder = export(drafter(model), model, tmp_path / "out", "speculators")
    edit(folder, lambda content: content.pop("norm_before_residual"))
    with pytest.raises(ModelError, match="doesn't say norm_before_residual"):
        load_drafter(folder, model.config)


WEIGHT_DAMAGE = [
    (lambda state: state.pop("fc.weight"), "lack fc.weight"),
    (lambda state: state.pop("d2t"), "a head of 7 rows for"),
    (lambda state: state.update({"mask_hidden": torch.zeros(2)}), "has mask_hidden, which this drafter has no place"),
    (lambda state: state.update({"norm.weight": torch.zeros(65)}), r"norm.weight is \(65,\), not \(64,\)"),
    (
        lambda state: state.update({"lm_head.weight": torch.zeros(7, 64, dtype=torch.int8)}),
        "lm_head.weight can't be I8",
    ),
    (lambda state: state.update(d2t=state["d2t"].float()), "d2t can't be F32"),
    (lambda state: state.update(d2t=-state["d2t"]), "must be ascending token ids"),
    (lambda state: state.update(d2t=state["d2t"] + 1000), "must be ascending token ids"),
    (lambda state: state.update(d2t=state["d2t"] + 1), "d2t and t2d name different tokens"),
    (lambda state: state.update(t2d=state["t2d"].long()), "t2d can't be I64"),
    (lambda state: state.update(d2t=state["d2t"][:, None]), "d2t is|rows for"),
]


@pytest.mark.parametrize(("damage", "reason"), WEIGHT_DAMAGE, ids=[reason for _, reason in WEIGHT_DAMAGE])
def test_damaged_weights_are_one_line(tmp_path, damage, reason) -> None:
    model = policy()
    folder = export(drafter(model), model, tmp_path / "out")
    weights(folder, damage)
    with pytest.raises(ModelError, match=reason) as caught:
        load_drafter(folder, model.config)
    assert "\n" not in str(caught.value)
