"""What a user notices of prompts: the mix, the held-out split, rendering, traces, and clear errors."""

import json
import subprocess
import sys
from random import Random

import pytest

from tlt_pipeline.config import ConfigError, TaskConfig, load_config, validate_config
from tlt_pipeline.tasks.mix import TaskMix, labelled_sources
from tlt_pipeline.tasks.prompts import Prompt, TaskError, extract_answer, prompt_text, render
from tlt_pipeline.tasks.traces import write_trace

SHORT = {
    "type": "reasoning_gym",
    "name": "chain_sum",
    "label": "short",
    "weight": 3,
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "question_pattern": "problem: (.*)",
}
BITS = {"type": "reasoning_gym", "name": "count_bits", "label": "bits", "params": {"min_n": 10, "max_n": 99}}


def task(*sources, **settings):
    settings.setdefault("held_out", 8)
    settings.setdefault("answer_pattern", r"#(-?\d+)")
    return TaskConfig.model_validate({"sources": list(sources) or [SHORT, BITS], **settings})


class Characters:
    """A tokenizer of character codes; its chat template, where it has one, names the roles."""

    def __init__(self, chat):
        self.has_chat_template = chat

    def encode_prompt(self, text):
        return [ord(character) for character in text]

    def apply_chat(self, messages):
        return self.encode_prompt("".join(f"<{m['role']}>{m['content']}" for m in messages))


def text(ids):
    return "".join(map(chr, ids))


def test_a_step_gets_the_same_prompts_again_and_another_seed_others():
    config = task()
    prompts = TaskMix(config, 7).draw(5, 16)
    resumed = TaskMix(config, 7)
    assert resumed.draw(5, 16) == prompts
    assert resumed.draw(6, 16) != prompts
    assert TaskMix(config, 8).draw(5, 16) != prompts


def test_every_step_keeps_the_weights():
    mix = TaskMix(task(), 0)
    for step in range(20):
        labels = [prompt.source for prompt in mix.draw(step, 16)]
        assert (labels.count("short"), labels.count("bits")) == (12, 4)
    few = [prompt.source for step in range(100) for prompt in mix.draw(step, 2)]
    assert 140 <= few.count("short") <= 160
    orders = {tuple(prompt.source for prompt in mix.draw(step, 16)) for step in range(5)}
    assert len(orders) == 5


def test_a_held_out_question_is_never_drawn():
    config = task(SHORT, held_out=60)  # of 200 questions that there are
    mix = TaskMix(config, 1)
    apart = {prompt.question for prompt in mix.held_out()}
    drawn = {prompt.question for step in range(40) for prompt in mix.draw(step, 16)}
    assert len(mix.held_out()) == 60
    assert len(drawn) > 100
    assert not drawn & apart
    assert TaskMix(config, 2).held_out() == mix.held_out()


def test_all_questions_held_out_is_an_error():
    one = {**SHORT, "name": "count_bits", "params": {"min_n": 5, "max_n": 5}, "question_pattern": None}
    with pytest.raises(TaskError, match=r"held out.*lower task\.held_out"):
        TaskMix(task(one, held_out=1), 0).draw(0, 1)


def test_questions_and_answers_are_reasoning_gyms():
    prompts = {prompt.source: prompt for prompt in TaskMix(task(), 0).draw(0, 16)}
    left, operator, right, equals = prompts["short"].question.split()
    total = int(left) + int(right) if operator == "+" else int(left) - int(right)
    assert (equals, prompts["short"].answer) == ("=", str(total))
    assert prompts["bits"].question.startswith("How many 1 bits are there in the binary representation")
    number = int(prompts["bits"].question.rstrip("?").split()[-1])
    assert prompts["bits"].answer == str(number.bit_count())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "chain_sun"}, r"no data set 'chain_sun'; did you mean 'chain_sum'\?"),
        ({"params": {"max_term": 3}}, r"refuses its params.*max_term"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, r"refuses its params.*max_terms must be"),
        ({"params": {"seed": 3}}, r"set 'seed', which the run decides: remove it"),
        ({"question_pattern": "(unclosed"}, r"question_pattern of task source 'short'.*no regular expression"),
        ({"question_pattern": "Calculate (.*)"}, r"does not match the question 'State the final"),
        ({"question_pattern": "problem"}, r"has no group: put the wanted part in parentheses"),
    ],
)
def test_a_wrong_source_is_one_line_with_the_remedy(change, message):
    with pytest.raises(TaskError, match=message) as caught:
        TaskMix(task({**SHORT, **change}), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": [SHORT, SHORT]}, "two task sources are called 'short': give each its own label"),
        ({"prompt_template": "Solve."}, r"prompt_template has no \{question\}"),
        ({"answer_pattern": "#(-?"}, "answer_pattern.*no regular expression"),
        ({"answer_pattern": "#-?"}, "answer_pattern.*no group"),
    ],
)
def test_a_wrong_task_section_is_one_line_with_the_remedy(settings, message):
    with pytest.raises(TaskError, match=message):
        TaskMix(TaskConfig.model_validate({"sources": [SHORT], **settings}), 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"nam": "gcd"}, r"unknown key 'task\.sources\.0\.nam'; did you mean 'name'\?"),
        ({"path": "a.jsonl", "verifyer": "exact"}, r"sources\.0\.verifyer'; did you mean 'verifier'\?"),
        ({"type": "gym", "name": "gcd"}, r"sources\.0: a task source is of type reasoning_gym or file"),
    ],
)
def test_a_mistyped_source_is_named(source, message):
    with pytest.raises(ConfigError, match=message):
        validate_config({"policy": {"model": "m"}, "task": {"sources": [source]}})


def test_the_type_of_a_source_may_be_left_out():
    sources = task({"name": "gcd"}, {"path": "a.jsonl"}).sources
    assert [source.type for source in sources] == ["reasoning_gym", "file"]


def test_the_last_match_is_the_answer():
    pattern = TaskConfig.model_fields["answer_pattern"].default
    assert extract_answer("<answer>1</answer> no: <answer>\n 2 </answer>", pattern) == "2"
    assert extract_answer("<answer>1", pattern) is None
    assert extract_answer("3+4=7#7#", r"#(\d+)?") == ""


QUESTION = Prompt("s", 0, "1 + 1 =", None, "2", "{}")
CHAT = Prompt("s", 0, "", ({"role": "user", "content": "hi"},), "2", "{}")


def test_a_template_may_hold_other_braces():
    config = task(prompt_template="{question}\nAnswer in \\boxed{}.", system_prompt="Be brief.")
    assert prompt_text(QUESTION, config) == "Be brief.\n1 + 1 =\nAnswer in \\boxed{}."


def test_chat_models_get_a_chat_and_others_plain_text():
    config = task(prompt_template="Q: {question}", system_prompt="Be brief.")
    assert text(render(QUESTION, config, Characters(True))) == "<system>Be brief.<user>Q: 1 + 1 ="
    assert text(render(QUESTION, config, Characters(False))) == "Be brief.\nQ: 1 + 1 ="
    assert text(render(CHAT, config, Characters(True))) == "<system>Be brief.<user>hi"
    off = task(chat="off")
    assert text(render(QUESTION, off, Characters(True))) == "1 + 1 ="


def test_a_chat_without_a_template_is_an_error():
    with pytest.raises(TaskError, match=r"no chat template: set task\.chat to off"):
        render(QUESTION, task(chat="on"), Characters(False))
    with pytest.raises(TaskError, match="holds messages, which need a chat template"):
        render(CHAT, task(), Characters(False))


@pytest.mark.parametrize("name", ["quickstart", "pretrain-quickstart"])
def test_traces_of_the_quickstart_end_in_the_right_answer(name):
    config = load_config(f"configs/{name}.yaml").task
    sources = labelled_sources(config)
    prompts = TaskMix(config, 3).draw(0, 400)
    for prompt in prompts:
        trace = write_trace(sources[prompt.source], prompt.entry)
        assert extract_answer(trace, config.answer_pattern) == prompt.answer
    lengths = sorted(len(write_trace(sources[prompt.source], prompt.entry)) for prompt in prompts)
    assert lengths[396] >= 4 * lengths[200]


def test_steps_of_a_trace_are_right_without_slips_and_some_wrong_with():
    entry = json.dumps({"question": "State the final answer to the following arithmetic problem: 12 + 5 - 30 ="})
    source = labelled_sources(task())["short"]
    assert write_trace(source, entry) == "12+5=17-30=-13#-13"
    bits = labelled_sources(task())["bits"]
    entry = json.dumps({"question": "How many 1 bits are there in the binary representation of the number 13?"})
    assert write_trace(bits, entry) == "13:01 06:01 03:02 01:03#3"
    rng = Random(0)
    slipped = [write_trace(bits, entry, 0.2, rng) for _ in range(500)]
    right = slipped.count(write_trace(bits, entry)) / 500
    assert 0.45 < right < 0.6  # three steps, each right 4 times in 5
    assert [write_trace(bits, entry, 0.2, rng) for rng in [Random(0)] for _ in range(500)] == slipped


def test_a_task_without_traces_says_so():
    source = labelled_sources(task({**BITS, "name": "gcd"}))["bits"]
    with pytest.raises(TaskError, match=r"no traces for 'gcd', only for reasoning-gym's .*chain_sum.*sft\.data\.path"):
        write_trace(source, "{}")


def test_prompts_and_verifiers_need_no_torch():
    code = (
        "import sys, tlt_pipeline.tasks.pool, tlt_pipeline.tasks.files, tlt_pipeline.tasks.traces;"
        "sys.exit('torch' in sys.modules or 'reasoning_gym' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
