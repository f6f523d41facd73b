"""Base class of all options of the stage scheduler."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Options(BaseModel):
    """Strict and frozen options; an unknown key is an error. An empty section has its defaults.

    ``aliases``: other names of options, with the same meaning. An option that is given under two names is an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    aliases: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            return value
        by_name = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is dict}
        given = {key: inner for key, inner in value.items() if inner is not None or key not in by_name}
        for alias, name in cls.aliases.items():
            if alias in given:
                if name in given:
                    raise ValueError(f"options {alias!r} and {name!r} are the same: keep one")
                given[name] = given.pop(alias)
        return given

    def check_enabled(self) -> None:
        """Refuse options other than the defaults while the field ``enabled`` is false: they would have no effect."""
        fields = type(self).model_fields
        changed = [name for name in fields if getattr(self, name) != fields[name].default]
        if changed and "enabled" not in changed:
            raise ValueError(f"option '{changed[0]}' needs 'enabled': turn that on, or remove '{changed[0]}'")
