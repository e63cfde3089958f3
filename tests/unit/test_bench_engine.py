"""`tlt bench engine` end to end on a policy of 30,000 parameters: rows, ratios, answers, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests import samples
from tests.tiny import write_tiny_config, write_tiny_policy
from tlt_pipeline.bus.journal import Journal
from tlt_pipeline.config import dump_config, load_config
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.strategies import OFF, Fixed, parse_strategy, strategies_of
from tlt_pipeline.messages import Array, DraftStats
from tlt_pipeline.models.checkpoint import load_decoder, save_drafter
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.rundir import prepare_run_dir
from tlt_pipeline.weights import WeightStore
from tlt_services import bench_engine
from tlt_services.bench_engine import spread
from tlt_services.bench_inputs import endless_requests, load_inputs
from tlt_services.bench_options import BenchOptions
from tlt_services.bench_report import Report, Row, draw_png
from tlt_services.bench_turns import decode_turn
from tlt_services.cli import invoke

FAST = ["--batch", "1,3", "--tokens", "24", "--repeat", "1", "--json", "b.json"]
ROW = {"batch", "strategy", "tokens_per_s", "acceptance_length", "step_ms", "ratio_to_off"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def drafter(folder: Path) -> Path:
    write_tiny_config(folder)
    save_drafter(drafter_from_policy(load_decoder(folder / "policy")), folder / "drafter")
    return folder / "drafter"


def measure(*arguments: str, code: int = 0) -> dict:
    assert invoke(["bench", "engine", *FAST, *arguments]) == code
    return json.loads(Path("b.json").read_text())


def test_a_model_with_a_drafter(drafter: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["off", "ngram-2", "eagle-1", "eagle-2x2x3"]
    models = ["--model", "policy", "--config", "tiny.yaml", "--drafter", "drafter", "--dtype", "float32"]
    report = measure(*models, "--strategies", ",".join(asked))
    expected = ["off_plain", *asked, "adaptive:beg_mab", "adaptive:goodput"]
    assert [(row["batch"], row["strategy"]) for row in report["rows"]] == [(b, s) for b in (1, 3) for s in expected]
    assert all(row.keys() == ROW for row in report["rows"])
    for row in report["rows"]:
        baseline = next(r for r in report["rows"] if r["batch"] == row["batch"])
        assert row["ratio_to_off"] == pytest.approx(row["tokens_per_s"] / baseline["tokens_per_s"])
        rate = row["batch"] * row["acceptance_length"] / row["step_ms"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(rate, rel=0.3), "but for tokens beyond an answer's end"
        most = {"off_plain": 1, "off": 1, "ngram-2": 3, "eagle-1": 2, "eagle-2x2x3": 3}.get(row["strategy"], 9)
        assert 1 <= row["acceptance_length"] <= most
    assert report["model"] == "policy" and report["dtype"] == "float32" and report["claim"] == "exact"
    assert report["compared"] >= 4 and report["identical"] == report["compared"]
    tail = report["tail_replay"]
    assert tail["ratio"] == pytest.approx(tail["off_s"] / tail["adaptive_s"])
    assert tail["answers"] == tail["identical"] == tail["batch"] == 3
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")
    assert {entry["strategy"] for entry in report["adaptive"]} == {"adaptive:beg_mab", "adaptive:goodput"}
    said = capfd.readouterr().out
    assert "3 of 3 answers identical" in said
    assert "eagle-2x2x3" in said and "adaptive:goodput" in said


def write_run(folder: Path, drafter: Path) -> Path:
    """A finished run of one step: policy version 0 answered, version 1 came of it."""
    config = load_config(folder / "tiny.yaml")
    run = prepare_run_dir(folder / "run", "tiny")
    dump_config(config, run.config)
    store = WeightStore.of_run(run.root, config)
    tokenizer, policy = load_tokenizer(folder / "policy"), load_decoder(folder / "policy")
    store.write_policy(0, policy, tokenizer, parent=-1, step=-1)
    store.write_policy(1, load_decoder(write_tiny_policy(folder / "next", seed=1)), tokenizer, parent=0, step=0)
    store.write_drafter(1, drafter_from_policy(policy), parent=0, policy_version=0, step=-1)
    store.write_drafter(2, drafter_from_policy(policy), parent=1, policy_version=0, step=0)
    sampling = samples.request().sampling.model_copy(update={"stop": (), "max_new_tokens": 24})
    requests = [
        samples.request(number, prompt=Array.of(list(range(2, 7 + number % 2))), sampling=sampling)
        for number in range(6)
    ]
    engine = Engine(policy, 0, tokenizer, config.engine)
    with Journal(run.journal) as journal:
        for number, done in enumerate(decode_all(engine, requests)):
            journal.append(done.request)
            draft = DraftStats(drafts=1, drafted=1, drafter_versions=(1,))
            answer = {"tokens": Array.of(done.tokens), "slot": number % 2, "draft": draft}
            journal.append(samples.completion(done.request, **answer))
    return run.root


def test_a_run_directory_brings_drafter_and_answers(folder: Path, drafter: Path) -> None:
    write_run(folder, drafter)
    report = measure("--model", "run", "--strategies", "eagle-2", "--batch", "2")
    assert (report["policy_version"], report["drafter_version"]) == (1, 2), "the newest"
    tail = report["tail_replay"]
    assert (tail["policy_version"], tail["drafter_version"]) == (0, 1), "those that wrote the answers"
    assert tail["answers"] == tail["identical"] == tail["as_recorded"] == 3, "one slot's share"
    assert tail["longest"] == 24


def test_prompts_of_a_file_and_no_drafter(folder: Path) -> None:
    write_tiny_config(folder)
    (folder / "p.txt").write_text("1 + 1 =\n\nHow many?\n")
    asked = ["--model", "policy", "--config", "tiny.yaml", "--prompts", "p.txt"]
    report = measure(*asked, "--batch", "2", "--png", "x.png")
    assert {"off_plain", "off"} <= {row["strategy"] for row in report["rows"]}
    assert not any(row["strategy"].startswith("eagle") for row in report["rows"])
    assert report["tail_replay"]["answers"] == 2, "as many as the largest batch"
    assert Path("x.png").is_file() and not Path("b.png").exists()


def test_a_model_alone_gets_sums_to_do(folder: Path) -> None:
    write_tiny_policy(folder / "policy")
    inputs = load_inputs(BenchOptions("policy", (4,), None, Path("x.png")))
    prompts = {inputs.tokenizer.decode(request.prompt.tolist()) for request in inputs.requests}
    assert len(prompts) == len(inputs.requests) == 8
    assert all("arithmetic" in prompt for prompt in prompts)
    assert len(inputs.tail.requests) == 4 and not inputs.tail.recorded


def test_without_matplotlib_a_line_says_what_brings_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    row = Row(1, "off_plain", 10.0, 1.0, 100.0, 1.0)
    draw_png(Report("m", "float32", "exact", 1, 0, 0, [row]), Path("b.png"))
    said = capfd.readouterr().err.strip()
    assert "pip install 'tlt-pipeline[bench]'" in said and len(said.splitlines()) == 1
    assert not Path("b.png").exists()


def test_the_batch_stays_full_and_only_full_steps_count(drafter: Path) -> None:
    config = load_config("tiny.yaml")
    policy = load_decoder("policy")
    engine = Engine(policy, 0, load_tokenizer("policy"), config.engine)
    engine.set_drafter(drafter_from_policy(policy), 1)
    sampling = samples.request().sampling.model_copy(update={"stop": (), "max_new_tokens": 5})
    requests = [samples.request(number, sampling=sampling) for number in range(5)]
    answers: dict[str, list[int]] = {}
    turn = decode_turn(engine, Fixed(parse_strategy("eagle-2")), requests, 3, 60, answers)
    assert turn.tokens >= 60 and turn.rows == 3 * turn.steps["eagle-2"]
    assert set(turn.steps) == {"eagle-2"}
    assert not engine.running and not engine.waiting
    for done in decode_all(engine, requests):
        assert answers[done.request.request_id] == done.tokens
    assert len(answers) > len(requests), "they went on with new seeds"


@pytest.mark.parametrize("strategy", ["ngram-4", "eagle-2"])
def test_a_turn_comes_out_the_same_again(drafter: Path, strategy: str) -> None:
    """Nothing of one turn helps the next: the n-gram index would know all answers by then."""
    config = load_config("tiny.yaml")
    policy = load_decoder("policy")
    engine = Engine(policy, 0, load_tokenizer("policy"), config.engine)
    engine.set_drafter(drafter_from_policy(policy), 1)
    sampling = samples.request().sampling.model_copy(update={"stop": (), "max_new_tokens": 40, "temperature": 0.0})
    requests = [samples.request(number, sampling=sampling) for number in range(4)]
    fixed = Fixed(parse_strategy(strategy))
    first, again = (decode_turn(engine, fixed, requests, 2, 150, {}) for _ in range(2))
    assert first.accepted
    assert (again.tokens, again.rows, again.accepted, again.steps) == (
        first.tokens,
        first.rows,
        first.accepted,
        first.steps,
    )


def test_repeated_requests_have_other_seeds() -> None:
    requests = [samples.request(number) for number in range(3)]
    repeated = list(islice(endless_requests(requests), 8))
    assert repeated[:3] == requests
    assert len({request.seed for request in repeated}) == len({each.request_id for each in repeated}) == len(repeated)


def test_the_default_is_a_spread_of_what_the_config_allows(folder: Path) -> None:
    allowed = strategies_of(load_config(write_tiny_config(folder)).engine.speculation)
    names = [str(strategy) for strategy in spread(allowed)]
    assert names == ["off", "ngram-4", "eagle-2", "eagle-3", "eagle-4", "eagle-3x3x8", "eagle-5x4x16"]
    assert spread((OFF,)) == (OFF,)


BAD_CALLS = [
    ("", 2, "Missing option '--model'"),
    ("--model ./nowhere", 2, "no model './nowhere' here"),
    ("--model policy --batch 1,two", 2, "--batch 1,two: give numbers"),
    ("--model policy --batch 0", 2, "from 1 to 1024"),
    ("--model policy --strategies eagel-4", 2, "'eagel-4' is no strategy"),
    ("--model policy --strategies eagle-40", 2, "a depth is from 1 to 16"),
    ("--model policy --strategies eagle-4", 2, "needs a trained drafter: give --drafter"),
    ("--model policy --drafter policy", 2, "holds no drafter"),
    ("--model policy --drafter nowhere", 2, "nowhere"),
    ("--model policy --dtype float16", 2, "give one of auto, float32, bfloat16, float64"),
    ("--model policy --prompts nowhere.txt", 2, "no file nowhere.txt"),
    ("--model policy --config nowhere.yaml", 2, "no config file nowhere.yaml"),
    ("--model policy engine.exact=off", 2, "give --config FILE"),
    ("--model policy --json nowhere/b.json", 2, "can't be written"),
    ("--model policy --png policy", 2, "can't be written"),
    ("--model policy --tokens 0", 2, "--tokens"),
    ("--model policy --bogus", 2, "No such option"),
]


@pytest.mark.parametrize(("call", "code", "text"), BAD_CALLS, ids=[call for call, _, _ in BAD_CALLS])
def test_a_mistake_is_one_line_with_the_remedy(
    folder: Path, capfd: pytest.CaptureFixture[str], call: str, code: int, text: str
) -> None:
    write_tiny_policy(folder / "policy")
    assert invoke(["bench", "engine", *call.split()]) == code
    said = capfd.readouterr().err.strip()
    assert text in said
    assert len(said.splitlines()) == 1 and said.startswith("tlt")


def test_an_interrupt_is_a_clean_end(
    drafter: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_engine, "decode_turn", interrupt)
    assert invoke(["bench", "engine", "--model", "policy", "--config", "tiny.yaml", *FAST]) == 130
    assert "Traceback" not in capfd.readouterr().err
    assert not Path("b.json").exists()


def test_mistakes_are_found_without_torch() -> None:
    code = (
        "import sys; from tlt_services.cli import invoke; invoke(['bench', 'engine', '--model', 'm', '--batch', 'x']); "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
