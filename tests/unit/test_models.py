"""The decoder against transformers, and Hugging Face folders read and written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.disk import locked
from tlt_pipeline.models.architecture import describe, parse_config, read_config
from tlt_pipeline.models.checkpoint import load_decoder, save_decoder
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, RopeScaling, initialize
from tlt_pipeline.models.locate import ModelError, fetched_folder
from tlt_pipeline.models.tokenizer import load_tokenizer

TOLERANCE = 1e-4
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-3-rope": ("llama", {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-size": ("llama", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}
OURS = DecoderConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ARCHITECTURES, scope="module")
def theirs(request, tmp_path_factory):
    """A random model of transformers, with its folder, in shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = ARCHITECTURES[request.param]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes})).float().eval()
    for name, parameter in model.named_parameters():
        # biases and norms that matter, unlike those of a fresh model
        torch.nn.init.normal_(parameter.data, mean=1.0 if "norm" in name else 0.0, std=0.1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model, folder


def logits(model, tokens_BT):
    with torch.inference_mode():
        out = model(tokens_BT)
    return out if isinstance(out, torch.Tensor) else out.logits


def random_tokens(shape, vocabulary, seed=0):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def make_decoder(config=OURS, seed=0):
    model = Decoder(config)
    initialize(model, torch.Generator().manual_seed(seed))
    return model


def test_the_logits_are_those_of_transformers(theirs):
    model, folder = theirs
    assert len(list(folder.glob("*.safetensors"))) > 1
    tokens_BT = random_tokens((2, 200), 97)
    expected = logits(model, tokens_BT)
    assert (logits(load_decoder(folder), tokens_BT) - expected).abs().max() <= TOLERANCE
    assert expected.std() > 0.1


def test_transformers_loads_what_is_written(theirs, tmp_path):
    from transformers import AutoModelForCausalLM

    model, folder = theirs
    save_decoder(load_decoder(folder), tmp_path, {"eos_token_id": 5})
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    assert type(again) is type(model) and again.config.eos_token_id == 5 and again.config.bos_token_id is None
    tokens_BT = random_tokens((1, 100), 97)
    assert (logits(again, tokens_BT) - logits(model, tokens_BT)).abs().max() <= TOLERANCE


def test_the_config_survives_a_round_trip(theirs):
    config = read_config(theirs[1])
    assert parse_config(describe(config)) == config


def test_shards_come_back_to_the_bit(tmp_path):
    model = make_decoder()
    save_decoder(model, tmp_path, shard_bytes=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    loaded = dict(load_decoder(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def test_a_tied_head_stays_tied(tmp_path):
    model = make_decoder(DecoderConfig(**{**OURS.__dict__, "tie_word_embeddings": True}))
    save_decoder(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_decoder(tmp_path)
    assert loaded.lm_head.weight is loaded.embed.weight
    loaded(random_tokens((1, 4), 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_weights_are_kept_in_the_dtype_asked_for(tmp_path):
    model = make_decoder()
    save_decoder(model, tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_decoder(tmp_path, torch.bfloat16)
    assert torch.equal(loaded.embed.weight, model.embed.weight.to(torch.bfloat16))


def test_rope_of_older_files_is_read():
    new = {**SMALL, "model_type": "llama", "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}}
    old = {**SMALL, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}
    older = {**old, "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in LLAMA3_SCALING.items()}}
    assert parse_config(new) == parse_config(old) == parse_config(older)
    assert parse_config(new).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert parse_config({**SMALL, "model_type": "llama"}).rope_theta == 10_000.0


QWEN = {**SMALL, "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({**SMALL, "model_type": "gpt2"}, "model_type 'gpt2' is not supported: take a dense llama"),
        ({**SMALL}, "model_type None is not supported"),
        ({**SMALL, "model_type": "qwen3_moe"}, "'qwen3_moe' is not supported"),
        ({**SMALL, "model_type": "llama", "num_local_experts": 8}, "experts"),
        ({**QWEN, "use_sliding_window": True}, "sliding-window"),
        ({**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({**QWEN, "quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({**QWEN, "hidden_act": "gelu"}, "'gelu'"),
        ({**QWEN, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({**QWEN, "partial_rotary_factor": 0.5}, "partial rotary"),
        ({"model_type": "llama", "hidden_size": 64}, "lacks 'num_attention_heads'"),
        ({**SMALL, "model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, "lacks 'factor'"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_in_one_line(content, line):
    with pytest.raises(ModelError, match=line) as caught:
        parse_config(content, "folder/x")
    assert str(caught.value).startswith("folder/x: ") and "\n" not in str(caught.value)


def test_a_window_that_is_off_is_no_obstacle():
    assert parse_config({**QWEN, "use_sliding_window": False, "sliding_window": 131072}).qkv_bias


def test_a_combination_that_no_architecture_has_is_not_written():
    with pytest.raises(ModelError, match="no supported architecture"):
        describe(DecoderConfig(**{**OURS.__dict__, "o_bias": True}))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), "can't be read"),
        (lambda folder: as_folder(folder / "model.safetensors"), "can't be read"),
        (lambda folder: cut(folder / "model.safetensors"), "model.safetensors is torn"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors is torn"),
        (lambda folder: as_folder(folder / "config.json"), "no config.json"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is no JSON object"),
        (lambda folder: index(folder, {}), "no weight_map of file names"),
        (lambda folder: index(folder, []), "no weight_map of file names"),
        (lambda folder: index(folder, {"weight_map": {}}), "no weight_map of file names"),
        (lambda folder: index(folder, {"weight_map": {"a": 3}}), "no weight_map of file names"),
        (
            lambda folder: index(folder, {"weight_map": {"a": "../other/model.safetensors"}}),
            "no weight_map of file names",
        ),
        (lambda folder: index(folder, {"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors: No such file"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "no weight_map of file names"),
        (lambda folder: edit(folder, hidden_size="wide"), "hidden_size can't be 'wide'"),
        (lambda folder: edit(folder, num_hidden_layers="two"), "num_layers can't be 'two'"),
        (lambda folder: edit(folder, num_attention_heads=0), "wrong kind|num_heads can't be 0"),
        (lambda folder: edit(folder, vocab_size=None), "vocab_size can't be None"),
        (lambda folder: edit(folder, rope_parameters={"rope_type": "llama3"}), "lacks 'factor'"),
        (lambda folder: edit(folder, layer_types=3), "wrong kind"),
        (lambda folder: change(folder, remove="model.norm.weight"), "lack model.norm.weight"),
        (lambda folder: change(folder, add="model.layers.0.self_attn.q_proj.bias"), "no place for 1 tensors"),
        (lambda folder: edit(folder, num_hidden_layers=1), "no place for 9 tensors"),
        (lambda folder: edit(folder, intermediate_size=47), r"config.json says \(94, 32\)"),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path, damage, line):
    save_decoder(make_decoder(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=line) as caught:
        load_decoder(tmp_path)
    assert "\n" not in str(caught.value)


def as_folder(path):
    path.unlink()
    path.mkdir()


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def index(folder, content):
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def change(folder, remove=None, add=None):
    state = load_file(folder / "model.safetensors")
    state.pop(remove, None)
    save_file(state | ({add: torch.zeros(32)} if add else {}), folder / "model.safetensors")


def edit(folder, **settings):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **settings}))


def test_a_locked_folder_is_one_line(tmp_path):
    save_decoder(make_decoder(), tmp_path)
    for file, line in (("model.safetensors", "Permission denied"), ("config.json", "see to its permissions")):
        with locked(tmp_path / file), pytest.raises(ModelError, match=line):
            load_decoder(tmp_path)
    load_decoder(tmp_path)


def test_inverse_frequencies_of_older_checkpoints_are_ignored(tmp_path):
    save_decoder(make_decoder(), tmp_path)
    change(tmp_path, add="model.layers.0.self_attn.rotary_emb.inv_freq")
    load_decoder(tmp_path)


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.skipif(
    not fetched_folder("smollm2-135m").is_dir(),
    reason="SmolLM2 is not fetched: run `tlt models fetch smollm2-135m`",
)
def test_smollm2_computes_and_chats_as_in_transformers():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetched_folder("smollm2-135m")
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 12 + 34?\n\nThink, é 漢字  <|im_end|>"}]
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat(messages) == ids
    assert tokenizer.decode(ids, keep_special=True) == reference.decode(ids)
    assert tokenizer.eos_ids == (reference.eos_token_id,) and tokenizer.pad_id == reference.pad_token_id
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens_BT = torch.cat([torch.tensor([ids]), random_tokens((1, 64), 49_152)], 1)
    assert (logits(load_decoder(folder), tokens_BT) - logits(model, tokens_BT)).abs().max() <= TOLERANCE
