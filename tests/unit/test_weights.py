"""Versioned weight sets: whole or not at all, never changed, checked when loaded."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.disk import locked
from tlt_pipeline.config import validate_config
from tlt_pipeline.messages import decode, encode
from tlt_pipeline.models.checkpoint import load_drafter, save_drafter
from tlt_pipeline.models.decoder import Decoder, DecoderConfig, initialize
from tlt_pipeline.models.drafter import EagleDrafter, drafter_from_policy
from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tokenizer import character_tokenizer, load_tokenizer
from tlt_pipeline.weights import WeightsError, WeightsMissing, WeightStore

CONFIG = DecoderConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
TOKENIZER = character_tokenizer("0123456789+= \n")


def make_policy(seed=0):
    model = Decoder(CONFIG)
    initialize(model, torch.Generator().manual_seed(seed))
    return model


def same(left, right):
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights", keep=10)


def publish(store, version, seed=None):
    policy = make_policy(version if seed is None else seed)
    return store.write_policy(version, policy, TOKENIZER, parent=version - 1, step=version - 1)


def test_a_policy_comes_back_to_the_bit(store):
    policy = make_policy()
    message = store.write_policy(3, policy, TOKENIZER, parent=2, step=2, metrics={"loss": 0.5}, final=True)
    assert (message.version, message.parent, message.policy_version, message.final) == (3, 2, 3, True)
    assert message.path == "policy/v000003" and message.metrics == {"loss": 0.5}
    assert decode(encode(message)) == message
    assert same(store.load_policy(message), policy) and same(store.load_policy(3), policy)
    assert store.load_policy(3, dtype=torch.bfloat16).embed.weight.dtype is torch.bfloat16
    assert load_tokenizer(store.folder("policy", 3)).eos_ids == TOKENIZER.eos_ids


def test_another_process_finds_the_newest_version(store):
    assert store.latest("policy") is None
    messages = [publish(store, version) for version in (0, 2, 1)]
    other = WeightStore(store.root, keep=10)
    assert other.versions("policy") == [0, 1, 2]
    assert other.latest("policy") == messages[1]
    assert other.find("policy", 1) == messages[2]


def test_writing_a_version_again_is_no_change_if_it_is_equal(store):
    policy = make_policy()
    first = store.write_policy(1, policy, TOKENIZER, parent=0, step=0, metrics={"seconds": 1.0})
    again = store.write_policy(1, policy, TOKENIZER, parent=0, step=0, metrics={"seconds": 2.0})
    assert again == first


def test_a_version_never_changes(store):
    publish(store, 1, seed=1)
    with pytest.raises(WeightsError, match="versions never change"):
        publish(store, 1, seed=2)
    assert same(store.load_policy(1), make_policy(1))


def test_a_changed_byte_is_refused(store):
    message = publish(store, 1)
    file = store.folder("policy", 1) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for ref in (message, 1):
        with pytest.raises(WeightsError, match="not what was published"):
            store.load_policy(ref)


def test_another_set_than_the_one_announced_is_refused(store):
    message = publish(store, 1)
    with pytest.raises(WeightsError, match="not what was published"):
        store.load_policy(message.model_copy(update={"sha256": "0" * 64}))


def test_pruning_keeps_the_newest(tmp_path):
    store = WeightStore(tmp_path, keep=2)
    for version in range(5):
        publish(store, version)
    assert store.versions("policy") == [3, 4]
    with pytest.raises(WeightsMissing, match=r"version 1 .*kept are 3 to 4.*weights\.keep"):
        store.load_policy(1)
    assert WeightStore(tmp_path, keep=0).prune("policy") == [3]
    assert store.versions("policy") == [4]


def test_nothing_temporary_is_left_and_none_counts_as_a_version(store):
    publish(store, 1)
    (store.root / "policy" / ".tmp-abc").mkdir()
    publish(store, 2)
    assert store.versions("policy") == [1, 2]
    assert sorted(path.name for path in (store.root / "policy").iterdir()) == [
        ".tmp-abc",
        "v000001",
        "v000002",
    ]


def test_the_store_of_a_run_keeps_what_its_requests_may_ask_for(tmp_path):
    settings = {"policy": {"model": "x"}, "task": {"sources": [{"type": "reasoning_gym", "name": "chain_sum"}]}}
    config = validate_config({**settings, "max_staleness": 3, "weights": {"keep": 1}})
    store = WeightStore.of_run(tmp_path, config)
    for version in range(7):
        publish(store, version)
    assert store.root == tmp_path / "weights" and store.versions("policy") == [2, 3, 4, 5, 6]


def test_readers_never_see_half_a_version(tmp_path):
    """One thread publishes and prunes while another loads: every load is whole, or says that it is gone."""
    store = WeightStore(tmp_path, keep=1)
    publish(store, 0)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(lambda: [publish(store, version) for version in range(1, 20)])
        loaded = set()
        while not writer.done():
            version = store.versions("policy")[-1]
            try:
                assert same(store.load_policy(version), make_policy(version))
            except WeightsMissing:
                continue
            loaded.add(version)
        writer.result()
    assert loaded and store.versions("policy") == [19]


def test_what_a_crashed_writer_left_is_removed_in_time(store):
    publish(store, 1)
    old, new = store.root / "policy" / ".tmp-old", store.root / "policy" / ".tmp-new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    store.prune("policy")
    assert not old.exists() and new.exists()


@pytest.mark.parametrize(
    "content",
    [
        '{"published": {',
        "[]",
        "7",
        "{}",
        '{"published": {}, "files": 7}',
        '{"published": {}, "files": {"config.json": 7}}',
        '{"published": {}, "files": {"config.json": ["x", "y"]}}',
        '{"published": 7, "files": {}}',
    ],
)
def test_a_damaged_manifest_is_one_line(store, content):
    publish(store, 1)
    (store.folder("policy", 1) / "set.json").write_text(content)
    with pytest.raises(WeightsError, match="damaged"):
        store.load_policy(1)


@pytest.mark.parametrize("name", ["set.json", "model.safetensors"])
@pytest.mark.parametrize("trouble", ["a folder in its place", "cut short", "locked"])
def test_a_file_that_cannot_be_read_is_one_line(store, name, trouble):
    publish(store, 1)
    file = store.folder("policy", 1) / name
    content = file.read_bytes()
    with contextlib.ExitStack() as stack:
        if trouble == "locked":
            stack.enter_context(locked(file))
        else:
            file.unlink()
            file.mkdir() if trouble == "a folder in its place" else file.write_bytes(content[: len(content) // 2])
        with pytest.raises(WeightsError, match="older version") as caught:
            store.load_policy(1)
    assert not isinstance(caught.value, WeightsMissing)
    assert "\n" not in str(caught.value) and str(store.folder("policy", 1)) in str(caught.value)


def test_a_drafter_comes_back_without_the_policys_tensors(store):
    policy = make_policy()
    drafter = drafter_from_policy(policy)
    message = store.write_drafter(4, drafter, parent=3, policy_version=9, step=8, metrics={"loss": 1.5})
    assert (message.model, message.policy_version, message.path) == ("drafter", 9, "drafter/v000004")
    assert same(store.load_drafter(message, CONFIG), drafter)
    names = load_file(store.folder("drafter", 4) / "model.safetensors").keys()
    assert set(names) == {name for name, _ in drafter.named_parameters()}
    assert not any(word in name for name in names for word in ("embed", "lm_head", "rope"))


def test_a_loaded_drafter_predicts_as_the_one_written(store):
    policy = make_policy()
    drafter = drafter_from_policy(policy)
    store.write_drafter(1, drafter, parent=0, policy_version=0, step=0)
    loaded = store.load_drafter(1, CONFIG)
    assert torch.equal(loaded.rope.cos, drafter.rope.cos) and torch.equal(loaded.rope.sin, drafter.rope.sin)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1.0, 2.5, 3.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([True, False]),
        torch.tensor([2, 1]),
        torch.tensor([1, 1]),
        torch.tensor([-1, 3]),
        torch.tensor([1, 16]),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([[1, 2]]),
    ],
    ids=lambda ids: f"{ids.dtype} {ids.tolist()}",
)
def test_tokens_to_propose_that_are_none_are_refused(tmp_path, ids):
    save_drafter(drafter_from_policy(make_policy()), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "draft_ids": ids}, file)
    with pytest.raises(ModelError, match="draft_ids") as caught:
        load_drafter(tmp_path, CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed.weight", "norm.weight", "model.embed_tokens.weight"])
def test_a_drafter_that_carries_frozen_tensors_is_refused_by_name(tmp_path, store, name):
    save_drafter(drafter_from_policy(make_policy()), tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(16, 32)}, file)
    with pytest.raises(ModelError, match=name):
        load_drafter(tmp_path / "drafter", CONFIG)


def test_a_drafter_of_another_policy_is_refused(store):
    store.write_drafter(1, EagleDrafter(CONFIG), parent=0, policy_version=0, step=0)
    with pytest.raises(ModelError, match="hidden_size 32, not 64"):
        store.load_drafter(1, replace(CONFIG, hidden_size=64))


def test_a_policy_folder_is_no_drafter(store):
    publish(store, 1)
    with pytest.raises(ModelError, match="holds no drafter"):
        load_drafter(store.folder("policy", 1), CONFIG)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on file sizes stands for the full disk: the same error path, without needing a small disk."""
    script = textwrap.dedent(
        f"""
        import resource
        from pathlib import Path
        import torch
        from tlt_pipeline.models.decoder import Decoder, DecoderConfig
        from tlt_pipeline.models.tokenizer import character_tokenizer
        from tlt_pipeline.weights import WeightStore
        from tlt_pipeline.failures import explain
        model = Decoder(DecoderConfig(**{CONFIG.__dict__!r}))
        store = WeightStore(Path({str(tmp_path)!r}), keep=3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            store.write_policy(1, model, character_tokenizer("abc"), parent=0, step=0)
        except Exception as error:
            failure = explain(error)
            print(failure.code, failure.expected, failure.line)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("1 True no space left to write"), done.stdout + done.stderr
    assert list((tmp_path / "policy").iterdir()) == []


def test_the_message_of_a_set_is_beside_it(store):
    message = publish(store, 1)
    stored = json.loads((store.folder("policy", 1) / "set.json").read_text())
    assert stored["published"]["sha256"] == message.sha256
    assert message.size == sum(size for size, _ in stored["files"].values())
