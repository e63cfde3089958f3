"""What all sections of the settings share."""

from __future__ import annotations

from typing import Annotated, Any, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LAST_PORT = 65535


class ConfigError(ValueError):
    """What the user wrote can't be run; the text is one line with the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_switches(cls, content: Any) -> Any:
        """YAML 1.1 reads a bare on or off as a boolean; where a setting has that word, it is meant."""
        if not isinstance(content, dict):
            return content
        given = cast(dict[str, Any], content)
        return {key: _as_switch(cls.model_fields.get(key), value) for key, value in given.items()}


def _as_switch(field: FieldInfo | None, value: Any) -> Any:
    word = "on" if value is True else "off"
    is_word = isinstance(value, bool) and field is not None and word in get_args(field.annotation)
    return word if is_word else value
