"""The user's own data files: what they may hold, how they are split, and what is said of a bad one."""

import json

import pytest

from tlt_pipeline.config import TaskConfig
from tlt_pipeline.tasks.files import read_rows
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import TaskError

ROWS = [{"prompt": f"What is {n} + 1?", "answer": n + 1, "level": n % 3} for n in range(20)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mix(path, seed=0, held_out=4, **source):
    sources = [{"type": "file", "path": str(path), **source}]
    return TaskMix(TaskConfig.model_validate({"sources": sources, "held_out": held_out}), seed)


def test_every_row_comes_once_an_epoch_in_another_order(tmp_path):
    prompts = mix(write(tmp_path / "sums.jsonl", ROWS))
    epochs = [[prompt.question for step in (2 * e, 2 * e + 1) for prompt in prompts.draw(step, 8)] for e in (0, 1)]
    apart = {prompt.question for prompt in prompts.held_out()}
    assert len(apart) == 4
    for epoch in epochs:
        assert sorted([*epoch, *apart]) == sorted(row["prompt"] for row in ROWS)
    assert epochs[0] != epochs[1]


def test_the_held_out_rows_are_the_same_for_every_seed(tmp_path):
    path = write(tmp_path / "sums.jsonl", ROWS)
    first, second = mix(path, seed=1), mix(path, seed=2)
    assert first.held_out() == second.held_out()
    assert first.draw(0, 8) != second.draw(0, 8)


def test_a_row_that_repeats_a_held_out_prompt_is_not_trained_on(tmp_path):
    prompts = mix(write(tmp_path / "sums.jsonl", ROWS * 3))
    apart = {prompt.question for prompt in prompts.held_out()}
    assert not apart & {prompt.question for step in range(10) for prompt in prompts.draw(step, 16)}


def test_columns_may_have_other_names_and_prompts_be_chats(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    rows = [{"problem": chat, "solution": "a"}]
    (prompt,) = mix(write(tmp_path / "chat.jsonl", rows), held_out=0, prompt_key="problem", answer_key="solution").draw(
        0, 1
    )
    assert prompt.messages == tuple(chat)
    (prompt,) = mix(write(tmp_path / "m.jsonl", [{"messages": chat, "answer": "a"}]), held_out=0).draw(0, 1)
    assert prompt.messages == tuple(chat)


def test_parquet_gives_what_jsonl_gives(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "sums.parquet")
    prompts = [
        mix(p, label="sums").draw(0, 8) for p in (tmp_path / "sums.parquet", write(tmp_path / "sums.jsonl", ROWS))
    ]
    assert [p.question for p in prompts[0]] == [p.question for p in prompts[1]]
    assert [p.entry for p in prompts[0]] == [p.entry for p in prompts[1]]
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(TaskError, match=r"bad\.parquet is not readable as Parquet"):
        mix(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no data file .*data\.jsonl: give the path"),
        (b"", r"data\.jsonl holds no rows"),
        (b"\n\n", r"data\.jsonl holds no rows"),
        (b'{"prompt": "a", "answer": 1}\n{"prompt": \n', r"data\.jsonl, line 2, is not JSON \(.*\): fix or remove it"),
        (b"[1, 2]\n", r"data\.jsonl, line 1, is no JSON object"),
        (b"\xff\xfe\x00", r"data\.jsonl can't be read as text"),
        (b'{"prompt": "a", "result": 1}', r"row 1, has no 'answer' \(columns: prompt, result\): set answer_key"),
        (b'{"question": "a", "answer": 1}', r"row 1, has no 'prompt' \(columns: answer, question\): set prompt_key"),
        (b'{"prompt": [{"text": "a"}], "answer": 1}', r"row 1: the prompt is neither text nor a list"),
        (b'{"prompt": [], "answer": 1}', r"row 1: the prompt is neither text nor a list"),
        (b'{"prompt": 3, "answer": 1}', r"row 1: the prompt is neither text nor a list"),
        (b'{"prompt": "a", "answer": "%s"}' % (b"x" * 300_000), r"row 1, takes 3\d+ characters \(limit 262144\)"),
        (b'{"prompt": "a", "answer": 1}', r"has 1 rows and 4 of them are held out.*lower task\.held_out"),
    ],
)
def test_a_bad_file_is_one_line_with_the_remedy(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        mix(path)
    assert "\n" not in str(caught.value)


def test_a_verifier_that_is_not_there_is_found_before_the_run(tmp_path):
    path = write(tmp_path / "sums.jsonl", ROWS)
    with pytest.raises(TaskError, match=r"no verifier 'exakt'; did you mean 'exact'\?"):
        mix(path, verifier="exakt")
    with pytest.raises(TaskError, match=r"no verifier 'mine'; give math_verify, exact, regex or module:function"):
        mix(path, verifier="mine")
    with pytest.raises(TaskError, match=r"module 'no_such\.checks' of verifier .* is not on the Python path"):
        mix(path, verifier="no_such.checks:score")


def test_blank_lines_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a", "answer": 1}\n\n')
    assert read_rows(str(tmp_path / "a.jsonl")) == [{"prompt": "a", "answer": 1}]
