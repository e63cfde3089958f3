"""Supervised training: a new policy, a cold start, and what the user can get wrong."""

from __future__ import annotations

import json

import pytest
import torch

from tests.tiny import tiny_settings, write_tiny_policy
from tlt_pipeline.config import ConfigError, RunConfig, validate_config
from tlt_pipeline.learner.sft import run_sft
from tlt_pipeline.learner.sft_data import draw_batches, encode_pairs, read_pairs
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.tasks.prompts import TaskError

NEW_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def settings(tmp_path, out="out", policy="none", **changes) -> RunConfig:
    sft = {
        "out": str(tmp_path / out),
        "steps": 30,
        "tokens_per_batch": 512,
        "lr": 1e-2,
        "warmup_steps": 5,
        "threads": 1,
        "data": {"examples": 200},
        "new_model": NEW_MODEL,
        **changes,
    }
    return validate_config({**tiny_settings(policy), "sft": sft})


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_new_policy_learns_and_transformers_loads_it(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = run_sft(settings(tmp_path))
    assert report.loss_last < 0.6 * report.loss_first
    assert (report.steps, report.examples, report.skipped) == (30, 200, 0)
    folder = tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert json.loads((folder / "sft.json").read_text())["report"]["loss_last"] == report.loss_last
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "State the answer: 4 + 3 =\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == load_tokenizer(folder).encode(text)
    theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits
    torch.testing.assert_close(theirs, load_decoder(folder)(torch.tensor([ids])), atol=1e-4, rtol=0)


def test_same_seed_same_bytes(tmp_path) -> None:
    files = []
    for out in ("one", "two"):
        run_sft(settings(tmp_path, out, steps=6))
        files.append((tmp_path / out / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_cold_start_from_a_policy_and_a_file(tmp_path) -> None:
    policy = write_tiny_policy(tmp_path / "policy")
    rows = [{"prompt": f"say {word}", "response": word} for word in ("yes", "no", "maybe")]
    data = {"path": write_rows(tmp_path / "rows.jsonl", rows)}
    run_sft(settings(tmp_path, policy=str(policy), new_model=None, data=data, steps=80))
    model, tokenizer = load_decoder(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    for row in rows:
        ids = tokenizer.encode(row["prompt"])
        answer = []
        while len(answer) < 10 and (not answer or answer[-1] not in tokenizer.eos_ids):
            answer.append(int(model(torch.tensor([ids + answer]))[0, -1].argmax()))
        assert tokenizer.decode(answer) == row["response"]
        assert answer[-1] in tokenizer.eos_ids


def test_result_replaces_an_earlier_one_in_the_place_of_the_policy(tmp_path) -> None:
    policy = write_tiny_policy(tmp_path / "policy")
    before = (policy / "model.safetensors").read_bytes()
    run_sft(settings(tmp_path, out="policy", policy=str(policy), new_model=None, steps=2))
    assert (policy / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_response_follows_the_chat_template(tmp_path) -> None:
    policy = write_tiny_policy(tmp_path / "policy")
    plain = load_tokenizer(policy)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    tokenizer = Tokenizer({**plain.files, "chat_template.jinja": template.encode()})
    data = {"path": write_rows(tmp_path / "rows.jsonl", [{"prompt": "2+2", "response": "4"}])}
    config = settings(tmp_path, policy=str(policy), data=data)
    (example,) = encode_pairs(read_pairs(config, config.sft.data), config.task, tokenizer)
    assert tokenizer.decode(example.tokens[: example.prompt]) == "<user>2+2<assistant>"
    assert list(example.tokens[example.prompt :]) == [*tokenizer.encode("4"), tokenizer.eos_ids[0]]


def test_batches_take_every_example_each_epoch(tmp_path) -> None:
    config = settings(tmp_path, data={"examples": 40})
    examples = encode_pairs(
        read_pairs(config, config.sft.data), config.task, load_tokenizer(write_tiny_policy(tmp_path))
    )
    stream = draw_batches(examples, 300, seed=3)
    drawn = []
    while len(drawn) < 80:
        batch = next(stream)
        assert sum(len(examples[index].tokens) for index in batch) <= 300
        drawn += batch
    assert sorted(drawn[:40]) == list(range(40))
    assert drawn[:40] != drawn[40:80]


def test_examples_beyond_the_context_are_counted(tmp_path) -> None:
    rows = [{"prompt": "a", "response": "b" * length} for length in (3, 300)]
    data = {"path": write_rows(tmp_path / "rows.jsonl", rows)}
    report = run_sft(settings(tmp_path, data=data, steps=2))
    assert (report.examples, report.skipped) == (1, 1)
    data = {"path": write_rows(tmp_path / "rows.jsonl", rows[1:])}
    with pytest.raises(ConfigError, match="longer than the model's context of 256"):
        run_sft(settings(tmp_path, data=data))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "rows.jsonl:2 is not JSON"),
        ('{"prompt": "a"}', "rows.jsonl:2 has no text under 'response'"),
        ('{"response": "a"}', "rows.jsonl:2 has no 'prompt'"),
    ],
)
def test_bad_line_is_named(tmp_path, line, text) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=text):
        run_sft(settings(tmp_path, data={"path": str(path)}))


def test_user_errors_have_a_remedy(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        run_sft(settings(tmp_path, data={"path": str(tmp_path / "missing.jsonl")}))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="is empty"):
        run_sft(settings(tmp_path, data={"path": str(tmp_path / "empty.jsonl")}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(ConfigError, match="is no model folder"):
        run_sft(settings(tmp_path, out="full"))
    base = tiny_settings("none", task__sources=[{"type": "reasoning_gym", "name": "leg_counting"}])
    with pytest.raises(TaskError, match="no traces"):
        run_sft(validate_config({**base, "sft": {"out": str(tmp_path / "out"), "new_model": NEW_MODEL}}))
