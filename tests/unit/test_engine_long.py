"""Drafter-invariance over many tokens of real policies, in the dtypes that runs use, and what is left of it without
batch-invariant computation: the same distribution."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import engine_cases as cases
import pytest
import torch

from tlt_pipeline.config import EngineConfig, load_config
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.strategies import Fixed, parse_strategy
from tlt_pipeline.messages import Array, RolloutRequest, Sampling
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import drafter_from_policy
from tlt_pipeline.models.fetch import fetched_folder
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.tasks.mix import TaskMix
from tlt_pipeline.tasks.prompts import render

CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS = 20_000
Answers = dict[str, list[int]]


def requests_of(config_name: str, tokenizer: Tokenizer, most: int, count: int) -> list[RolloutRequest]:
    """Prompts of a run's own tasks, two answers each."""
    config = load_config(CONFIGS / config_name)
    prompts = TaskMix(config.task, seed=1).draw(0, count // 2)
    rendered = [render(prompt, config.task, tokenizer) for prompt in prompts]
    stop = tuple(tokenizer.eos_ids)
    return [
        RolloutRequest(
            request_id=f"r{number}",
            group_id=f"g{number // 2}",
            step=0,
            index=number % 2,
            policy_version=0,
            seed=77 + number,
            prompt=Array.of(rendered[number // 2]),
            sampling=Sampling(max_new_tokens=most, stop_token_ids=stop),
            source="none",
            entry="{}",
        )
        for number in range(count)
    ]


def decode(
    model: Decoder,
    tokenizer: Tokenizer,
    requests: list[RolloutRequest],
    strategy: str,
    *,
    batch: int,
    exact: str = "on",
) -> Answers:
    config = EngineConfig(max_batch=batch, max_context=800, exact=exact)  # type: ignore[arg-type]
    engine = Engine(model, 0, tokenizer, config)
    engine.set_drafter(drafter_from_policy(model), 1)
    engine.choice = cases.Shuffled(seed=2) if strategy == "mixed" else Fixed(parse_strategy(strategy))
    return {done.request.request_id: done.tokens for done in decode_all(engine, requests)}


def count_tokens(answers: Answers) -> int:
    return sum(map(len, answers.values()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_mismatch_in_20_000_tokens_of_the_quickstart(dtype: torch.dtype) -> None:
    folder = CONFIGS / "quickstart-policy"
    model, tokenizer = load_decoder(folder, dtype=dtype), load_tokenizer(folder)
    requests = requests_of("quickstart.yaml", tokenizer, 600, 288)
    expected = decode(model, tokenizer, requests, "off", batch=64)
    assert count_tokens(expected) > TOKENS
    assert decode(model, tokenizer, requests, "mixed", batch=23) == expected


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_mismatch_in_20_000_tokens_of_smollm2(dtype: torch.dtype) -> None:
    folder = fetched_folder("smollm2-135m")
    if not folder.is_dir():
        pytest.skip("SmolLM2 is not fetched: tlt models fetch smollm2-135m")
    model, tokenizer = load_decoder(folder, dtype=dtype), load_tokenizer(folder)
    requests = requests_of("smollm2-135m.yaml", tokenizer, 160, 400)
    expected = decode(model, tokenizer, requests, "off", batch=32)
    assert count_tokens(expected) > TOKENS
    assert decode(model, tokenizer, requests, "mixed", batch=19) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_parts_without_exact_computation(capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16, plain: how many of a thousand draws differ between decoding and verifying, printed. Counted up to
    where two answers part: what follows is another text."""
    folder = CONFIGS / "quickstart-policy"
    model, tokenizer = load_decoder(folder, dtype=torch.bfloat16), load_tokenizer(folder)
    requests = requests_of("quickstart.yaml", tokenizer, 200, 64)
    off = decode(model, tokenizer, requests, "off", batch=1, exact="off")
    mixed = decode(model, tokenizer, requests, "eagle-4", batch=32, exact="off")
    parted = sum(off[name] != mixed[name] for name in off)
    shared = sum(_shared(off[name], mixed[name]) for name in off)
    with capsys.disabled():
        rate = 1000 * parted / shared
        sys.stdout.write(f"\nexact: off, bfloat16: {parted} of {len(off)} answers part, {rate:.2f} per 1000 tokens\n")
    assert parted / shared < 0.05


def _shared(left: list[int], right: list[int]) -> int:
    together = zip(left, right, strict=False)
    return 1 + next((place for place, (one, other) in enumerate(together) if one != other), min(len(left), len(right)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.6}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0, "top_k": 6}],
    ids=str,
)
def test_without_exactness_the_distribution_is_the_same(sampling: dict[str, float]) -> None:
    """Two samples of pairs of tokens from one prompt, with other seeds: decoded, and verified."""
    model = cases.policy(dtype=torch.bfloat16)
    pairs: list[Counter[tuple[int, ...]]] = []
    for first_seed, strategy in ((0, "off"), (1 << 20, "mixed")):
        engine = cases.engine(model, batch=64, speculate_up_to=64, exact="off")
        engine.set_drafter(cases.drafter(model), 1)
        engine.choice = cases.Shuffled(seed=1) if strategy == "mixed" else Fixed(parse_strategy(strategy))
        settings = {"max_new_tokens": 3, "stop_token_ids": (), **sampling}
        requests = [
            cases.request(0, **settings).model_copy(update={"request_id": f"r{n}", "seed": first_seed + n})
            for n in range(1600)
        ]
        pairs.append(Counter(tuple(done.tokens[:2]) for done in decode_all(engine, requests)))
    assert _chi_square(*pairs) < 4.0


def _chi_square(left: Counter[tuple[int, ...]], right: Counter[tuple[int, ...]]) -> float:
    """Of two samples of one size, standardised: about N(0, 1) where their distributions are equal."""
    rare, common = Counter[str](), []
    for outcome in left.keys() | right.keys():
        if left[outcome] + right[outcome] >= 10:
            common.append((left[outcome], right[outcome]))
        else:
            rare.update(left=left[outcome], right=right[outcome])
    cells = [*common, (rare["left"], rare["right"])]
    statistic = sum((one - other) ** 2 / (one + other) for one, other in cells if one + other)
    freedom = len(cells) - 1
    assert freedom > 5
    return (statistic - freedom) / (2 * freedom) ** 0.5
