"""Tables of what a scenario of the simulator may say, from the models that read it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from result_tables import default_or_kind, plain_table

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.sim.scenario.scenario import Scenario, Workload
from vllm_omni_sched.sim.study.options import StudyOptions

_ELSEWHERE = (OmniSchedConfig, StageSchedConfig)  # tables of their own, on other pages


def keys() -> str:
    """Show each table of a scenario, then of a study."""
    parts = []
    for model in (Scenario, StudyOptions):
        plain = {name: field for name, field in model.model_fields.items() if not _models(field.annotation)}
        parts.append(f"\n### {'A run' if model is Scenario else 'A study'}\n\n" + _table(plain))
        for name, field in model.model_fields.items():
            tables = {inner: _flat(inner) for inner in _models(field.annotation)}
            shared = _shared(tables)
            if shared:
                parts.append(f"\n#### `[[{name}]]`\n\n{field.description}\n\n" + _table(shared))
            for inner, keys in tables.items():
                own = {key: field for key, field in keys.items() if key not in shared}
                said = "" if shared else f"{field.description}\n"
                parts.append(f"\n#### {_heading(name, field.annotation, inner)}\n\n{said}")
                if inner not in _ELSEWHERE:
                    parts.append("\n" * bool(said) + _table(own))
    return "".join(parts)


def _shared(tables: Mapping[type[BaseModel], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys that several tables have with the same meaning, naming the kinds where not all have them."""
    shared: dict[str, Any] = {}
    for key, field in ((key, field) for keys in tables.values() for key, field in keys.items()):
        own = [inner for inner, keys in tables.items() if key in keys and keys[key].description == field.description]
        if len(own) > 1 and key not in shared:
            of = [f"`{get_args(inner.model_fields['kind'].annotation)[0]}`" for inner in own]
            said = field.description + (f" Of {', '.join(of)}." if len(own) < len(tables) else "")
            shared[key] = FieldInfo(annotation=field.annotation, default=field.default, description=said)
    return shared


def _heading(name: str, annotation: Any, model: type[BaseModel]) -> str:
    """Return the heading of a table as it is written in the file."""
    if get_origin(annotation) is tuple:
        kind = model.model_fields.get("kind")
        own = get_args(kind.annotation) if kind is not None else ()
        return f"`[[{name}]]`" + (f" of kind `{own[0]}`" if len(own) == 1 else "")
    return f"`[{name}.NAME]`" if get_origin(annotation) is dict else f"`[{name}]`"


def _flat(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return fields by dotted key, those of nested tables included."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if model is Workload and name == "options":
            continue  # written beside the others; they depend on the kind
        inner = _models(field.annotation)
        if len(inner) == 1 and get_origin(field.annotation) is not dict:
            found |= _flat(inner[0], f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def _table(fields: dict[str, Any]) -> str:
    return plain_table(("key", "default", "meaning"), _rows(fields))


def _rows(fields: dict[str, Any]) -> Iterable[Sequence[str]]:
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        values = _values(field.annotation)
        if default is PydanticUndefined:
            shown = f"needed: {values}"
        else:
            shown = default_or_kind(
                "" if default in (None, (), {}) else f"`{json.dumps(default).strip(chr(34))}`", values
            )
        if name == "kind" and values.startswith("`") and "," not in values:
            continue  # its heading says it
        yield f"`{name}`", shown, field.description or ""


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType, Annotated) and not _models(annotation):
        return _values(next(kind for kind in get_args(annotation) if kind is not type(None)))
    words = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    if isinstance(annotation, type) and annotation in words:
        return words[annotation]
    return {dict: "by name", list: "list", tuple: "list"}.get(get_origin(annotation), "number, or a table")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [model for kind in inner if get_origin(annotation) is not Literal for model in _models(kind)]
