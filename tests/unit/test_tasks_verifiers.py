"""Scoring in the verifier pool: right scores, and verifiers that raise, hang or die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError

import psutil
import pytest

from tlt_pipeline.config import TaskConfig
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.pool import Verdict, VerifierPool
from tlt_pipeline.tasks.prompts import TaskError

CHECKS = """
import os, sys, time

def score(answer, entry):
    if answer == "raise":
        raise KeyError("no such thing")
    if answer == "hang":
        while True:
            time.sleep(60)
    if answer == "die":
        os._exit(9)
    if answer == "exit":
        sys.exit("enough")
    if answer == "nan":
        return float("nan")
    if answer == "nothing":
        return None
    return 0.5 if answer == entry["answer"] and entry["bonus"] == 1 else 0.0
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A data set with the user's own verifier, which lies where the run is started."""
    (tmp_path / "my_checks.py").write_text(CHECKS)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "?", "answer": "yes", "bonus": 1}) + "\n")
    monkeypatch.chdir(tmp_path)
    source = {"type": "file", "path": "data.jsonl", "label": "own", "verifier": "my_checks:score"}
    return TaskConfig.model_validate({"sources": [source], "held_out": 0, "verify_timeout_s": 2.0})


def entry_of(config):
    return TaskMix(config, 0).draw(0, 1)[0].entry


def answer(text):
    return f"so <answer>{text}</answer>"


async def test_a_bad_verifier_scores_zero_with_the_reason_and_the_next_answer_is_scored(config):
    entry = entry_of(config)
    with VerifierPool(config) as pool:
        assert await pool.score("own", entry, answer("yes")) == Verdict(0.5)
        assert await pool.score("own", entry, answer("no")) == Verdict(0.0)
        assert await pool.score("own", entry, "no answer in here") == Verdict(0.0)
        reasons = {}
        for word in ("raise", "exit", "nan", "nothing", "hang", "die"):
            verdict = await pool.score("own", entry, answer(word))
            assert verdict.reward == 0.0
            reasons[word] = verdict.error
            assert await pool.score("own", entry, answer("yes")) == Verdict(0.5)
        assert "unknown" in str((await pool.score("unknown", entry, answer("yes"))).error)
    assert reasons["raise"] == "the verifier raised KeyError: 'no such thing'"
    assert reasons["exit"] == "the verifier raised SystemExit: enough"
    assert reasons["nan"] == "the verifier raised ValueError: the verifier returned nan"
    assert "TypeError" in reasons["nothing"]
    assert reasons["hang"] == "the verifier took longer than task.verify_timeout_s (2 s)"
    assert reasons["die"] == "the verifier's process died (exit code 9)"


async def test_a_search_without_end_is_cut_off(config):
    hard = config.model_copy(update={"answer_pattern": r"((?:a|aa)+)$"})
    with VerifierPool(hard) as pool:
        verdict = await pool.score("own", entry_of(config), "a" * 60 + "b")
    assert "longer than" in str(verdict.error)


async def test_many_answers_at_once_and_one_that_hangs(config):
    entry = entry_of(config)
    two = config.model_copy(update={"verify_workers": 2})
    words = ["yes", "hang", *["yes"] * 60]
    with VerifierPool(two) as pool:
        verdicts = await asyncio.gather(*[pool.score("own", entry, answer(word)) for word in words])
    assert [verdict.reward for verdict in verdicts] == [0.5, 0.0, *[0.5] * 60]


async def test_a_process_killed_between_answers_is_replaced(config):
    entry = entry_of(config)
    with VerifierPool(config) as pool:
        assert await pool.score("own", entry, answer("yes")) == Verdict(0.5)
        for process in workers():
            process.send_signal(signal.SIGKILL)
        assert await pool.score("own", entry, answer("yes")) == Verdict(0.5)


async def test_closing_leaves_no_process_and_cancels_who_waits(config):
    pool = VerifierPool(config.model_copy(update={"verify_timeout_s": 60.0}))
    waiting = asyncio.create_task(pool.score("own", entry_of(config), answer("hang")))
    await asyncio.sleep(0)
    processes = workers()
    assert processes
    await asyncio.to_thread(pool.close)
    with pytest.raises((asyncio.CancelledError, CancelledError)):
        await asyncio.wait_for(waiting, 10)
    assert not psutil.wait_procs(processes, 10)[1]


def test_a_hanging_verifier_does_not_outlive_a_killed_worker(config):
    code = """
        import asyncio, sys
        from tlt_pipeline.config import TaskConfig
        from tlt_pipeline.tasks.mix import TaskMix
        from tlt_pipeline.tasks.pool import VerifierPool

        async def main():
            config = TaskConfig.model_validate_json(sys.argv[1])
            pool = VerifierPool(config)
            entry = TaskMix(config, 0).draw(0, 1)[0].entry
            print(await pool.score("own", entry, "<answer>yes</answer>"), flush=True)
            await pool.score("own", entry, "<answer>hang</answer>")

        if __name__ == "__main__":
            asyncio.run(main())
    """
    with open("victim.py", "w") as script:
        script.write(textwrap.dedent(code))
    patient = config.model_copy(update={"verify_timeout_s": 600.0})
    victim = subprocess.Popen(
        [sys.executable, "victim.py", patient.model_dump_json()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert "0.5" in victim.stdout.readline()
        children = psutil.Process(victim.pid).children(recursive=True)
        assert children
        os.kill(victim.pid, signal.SIGKILL)
        assert not psutil.wait_procs(children, 10)[1]
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()


async def test_reasoning_gym_scores_with_its_own_verifier():
    names = {"chain_sum": {}, "spell_backward": {}, "number_sorting": {}, "game_of_life": {}}
    sources = [{"type": "reasoning_gym", "name": name, "params": params} for name, params in names.items()]
    config = TaskConfig.model_validate({"sources": sources, "held_out": 4, "verify_timeout_s": 30.0})
    mix = TaskMix(config, 0)
    with VerifierPool(config) as pool:
        for prompt in [*mix.draw(0, 8), *mix.held_out()]:
            assert await pool.score(prompt.source, prompt.entry, answer(prompt.answer)) == Verdict(1.0)
            wrong = await pool.score(prompt.source, prompt.entry, answer("???"))
            assert wrong.error is None
            assert wrong.reward < 1.0
        changed = json.dumps({**json.loads(prompt.entry), "question": "another"})
        assert "version has changed" in str((await pool.score(prompt.source, changed, answer("1"))).error)


async def test_verifiers_for_files(tmp_path):
    pytest.importorskip("math_verify")
    cases = {
        "exact": ("42", [(" 42 ", 1.0), ("42.0", 0.0)]),
        "regex": (r"\d+ apples?", [("7 apples", 1.0), ("7 apples or so", 0.0)]),
        "math_verify": (r"\frac{1}{2}", [("0.5", 1.0), ("1/2", 1.0), ("0.25", 0.0)]),
    }
    sources = []
    for name, (expected, _) in cases.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"prompt": "?", "answer": expected if name != "math_verify" else f"${expected}$"}))
        sources.append({"type": "file", "path": str(path), "label": name, "verifier": name})
    config = TaskConfig.model_validate({"sources": sources, "held_out": 0, "verify_timeout_s": 60.0})
    entries = {prompt.source: prompt.entry for prompt in TaskMix(config, 0).draw(0, 3)}
    with VerifierPool(config) as pool:
        for name, (_, answers) in cases.items():
            for given, reward in answers:
                assert await pool.score(name, entries[name], answer(given)) == Verdict(reward), (name, given)


def test_the_pool_refuses_a_verifier_that_is_not_there(config):
    source = config.sources[0].model_copy(update={"verifier": "missing_checks:score"})
    with pytest.raises(TaskError, match="not on the Python path"):
        VerifierPool(config.model_copy(update={"sources": (source,)}))


def workers():
    """This process's verifier processes, once they run."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        living = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        found = [p for p in living if "spawn_main" in " ".join(p.cmdline())]
        if found:
            return found
    return []
