"""What several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that replace the file's.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Save the numbers.")]
