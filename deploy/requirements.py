"""What the image installs besides the project itself, one requirement a line: `requirements.py PYPROJECT [EXTRA …]`.

Beside the project's dependencies and those of the extras it prints what builds the project, so that the layer with the
code needs no index. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Sorted. Raises SystemExit, with one line, for an extra that the project doesn't have."""
    content = tomllib.loads(pyproject.read_text())
    optional: dict[str, list[str]] = content["project"]["optional-dependencies"]
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        raise SystemExit(f"no extra {', '.join(unknown)}: choose EXTRAS from {', '.join(sorted(optional))}")
    of_extras = [line for extra in extras for line in optional[extra]]
    return sorted({*content["build-system"]["requires"], *content["project"]["dependencies"], *of_extras})


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])))  # noqa: T201
