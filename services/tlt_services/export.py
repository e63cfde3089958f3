"""`tlt export-drafter` and `tlt import-drafter`: a run's drafter for serving engines, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from torch import Tensor

from tlt_pipeline.config import ConfigError, RunConfig, load_config
from tlt_pipeline.folders import draft_folder, put_in_place
from tlt_pipeline.messages import WeightsPublished
from tlt_pipeline.models.architecture import read_config
from tlt_pipeline.models.checkpoint import load_decoder, load_drafter, read_embedding, save_drafter
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.export import Format, check_exportable, export_drafter, import_drafter
from tlt_pipeline.models.locate import ModelError, locate_model
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightsMissing, WeightStore
from tlt_services.acceptance import Acceptance, held_out_requests, measure_acceptance

MEASURED_PROMPTS, MEASURED_TOKENS = 16, 160
PROPOSED = 4


@dataclass(frozen=True)
class Source:
    """A drafter with the policy that it is for, and where that lies."""

    drafter: Drafter
    policy: Decoder
    policy_folder: Path
    published: WeightsPublished | None
    config: RunConfig | None


def write(source: Path, format: Format, out: Path, *, version: int | None, policy: str | None, measure: bool) -> int:
    found = _from_run(source, version) if (source / "config.yaml").is_file() else _from_folder(source, policy)
    check_exportable(found.drafter, format)
    norm_C: Tensor = found.policy.norm.weight
    acceptance = _measure(found) if measure and found.config is not None else None
    card = model_card(found, source, format, acceptance)
    tokens = PROPOSED if found.config is None else found.config.engine.speculation.depth
    export_drafter(
        found.drafter,
        found.policy.config,
        norm_C,
        out,
        format,
        tokenizer=found.policy_folder,
        card=card,
        tokens=tokens,
    )
    typer.echo(f"{out}: {format}, for the policy in {found.policy_folder}")
    if acceptance is not None:
        typer.echo(f"on {MEASURED_PROMPTS} held-out prompts, greedy: {acceptance}")
    return 0


def read(source: Path, policy: str, out: Path) -> int:
    """A serving engine's drafter as a folder of ours, which `drafter.init` takes (as it mostly takes the other one)."""
    folder = locate_model(policy)
    drafter = import_drafter(source, read_config(folder), embedding_VC=read_embedding(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(out) as draft:
        save_drafter(drafter, draft)
        if not put_in_place(draft, out):
            raise ModelError(f"{out} is there already: give another folder")
    typer.echo(str(out))
    return 0


def _from_run(source: Path, version: int | None) -> Source:
    """The newest policy of the run, which is what one serves, and the drafter of that version or the newest."""
    config, run = load_config(source / "config.yaml"), RunDir(source)
    store = WeightStore.of_run(run.root, config)
    published = store.latest("drafter") if version is None else store.find("drafter", version)
    policies = store.versions("policy")
    if published is None or not policies:
        raise WeightsMissing(f"{source} has no drafter and policy yet: let the run publish one")
    policy = store.load_policy(policies[-1])
    drafter = store.load_drafter(published, policy.config)
    return Source(drafter, policy, store.folder("policy", policies[-1]), published, config)


def _from_folder(source: Path, policy: str | None) -> Source:
    if policy is None:
        raise ConfigError(f"{source} is a drafter alone: say for which policy, by --policy FOLDER")
    folder = locate_model(policy)
    decoder = load_decoder(folder)
    return Source(load_drafter(source, decoder.config), decoder, folder, None, None)


def _measure(found: Source) -> Acceptance:
    assert found.config is not None
    tokenizer = load_tokenizer(found.policy_folder)
    limit = min(MEASURED_TOKENS, found.config.rollout.max_new_tokens)
    requests = held_out_requests(found.config, tokenizer, 1, MEASURED_PROMPTS, limit)
    depth = found.config.engine.speculation.depth
    return measure_acceptance(found.policy, found.drafter, tokenizer, found.config, requests, depth)


def model_card(found: Source, source: Path, format: Format, acceptance: Acceptance | None) -> str:
    """README.md of the exported folder: for what, trained on what, how good, how to serve it."""
    lines = ["# Drafter for speculative decoding", "", f"Policy: `{found.policy_folder}`. Format: {format}.", ""]
    if found.config is not None and found.published is not None:
        metrics = {name: round(value, 4) for name, value in found.published.metrics.items()}
        sources = ", ".join(each.label or getattr(each, "name", "") or "file" for each in found.config.task.sources)
        lines += [
            f"Trained in run `{found.config.name}` on the hidden states of the policy's own answers to: {sources}. "
            f"Drafter version {found.published.version}, the last one learned from is policy version "
            f"{found.published.policy_version}.",
            "",
            f"Held-out measures when it was published: `{json.dumps(metrics)}`",
            "",
        ]
    else:
        lines += [f"Exported from `{source}`. {_warmup_of(source)}", ""]
    if acceptance is not None:
        lines += [f"Greedy, on {MEASURED_PROMPTS} prompts that nothing was trained on: {acceptance}.", ""]
    return "\n".join([*lines, *_how_to_serve(found, format)])


def _warmup_of(source: Path) -> str:
    """What `tlt drafter warmup` noted beside the drafter."""
    try:
        noted = json.loads((source / "warmup.json").read_bytes())
        return (
            f"Trained by `tlt drafter warmup` on {noted['tokens_trained']} tokens of answers that `{noted['policy']}` "
            f"wrote; acceptance length on held-out answers then, at the run's temperature: "
            f"{noted['acceptance_length']}."
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "What it was trained on is not recorded there."


def _how_to_serve(found: Source, format: Format) -> list[str]:
    plugin = found.drafter.kind == "eagle"
    if format == "sglang":
        where = "Serve it with SGLang:"
        command = (
            f"python -m sglang.launch_server --model-path {found.policy_folder} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path THIS_FOLDER --speculative-num-steps {PROPOSED} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {PROPOSED + 1}"
        )
    else:
        speculative = json.dumps({"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": PROPOSED})
        brings = "that has vLLM and tlt-pipeline, which brings the drafter's model" if plugin else "that has vLLM"
        where = f"Serve it in an environment {brings}:"
        command = f"vllm serve {found.policy_folder} --speculative-config '{speculative}'"
    return [where, "", "```sh", command, "```", ""]
