"""What several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that replace the file's.")
]
