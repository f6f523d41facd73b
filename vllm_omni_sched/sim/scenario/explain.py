"""Explain validation errors in one sentence each, with the dotted key that an override would use."""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from vllm_omni_sched.config.load import explain
from vllm_omni_sched.config.nearest import did_you_mean


def explain_problem(error: Any, model: type[BaseModel], raw: Any, within: str = "") -> str:
    """Return a sentence for one error of pydantic.

    Args:
        error: an entry of ``ValidationError.errors()``.
        model: the model that was validated.
        raw: the value it was validated from, for names of entries in lists.
        within: the key that contains the value.
    """
    path, owner, inner = _walk(tuple(error["loc"]), model, raw)
    path = [within, *path] if within else path
    name = path[-1] if path else ""
    kind, at = error["type"], ".".join(path)
    if kind == "value_error":
        problem = str(error["msg"]).removeprefix("Value error, ")
        return f"in '{at}': {problem}" if at else problem
    if kind == "missing":
        meaning = (owner.model_fields[name].description or "").removesuffix(".")
        return f"'{at}' is missing" + (f": {meaning}" if meaning else "")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = str(error["ctx"]["discriminator"]).strip("'")
        tags = [str(get_args(one.model_fields[key].annotation)[0]) for one in inner]
        if kind == "union_tag_not_found":
            return f"'{at}.{key}' is missing: one of {tags}"
        return _choice(f"{at}.{key}", tags, error["ctx"]["tag"])
    if kind == "literal_error":
        return _choice(at, _literals(owner.model_fields[name].annotation), error["input"])
    if kind == "extra_forbidden":
        prefix = "".join(f"{part}." for part in path[:-1])
        hint = did_you_mean(name, list(owner.model_fields), lambda one: prefix + one)
        return f"unknown option '{at}'; " + (hint or f"known: {', '.join(owner.model_fields)}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"'{at}' must be a table, got {error['input']!r}"
    if kind == "tuple_type":
        return f"'{at}' must be a list of tables, [[{at}]], got {error['input']!r}"
    if kind == "string_pattern_mismatch":
        return f"'{at}' must be of letters, digits, '_' and '-', got {error['input']!r}"
    if name not in owner.model_fields:  # the entry of a mapping by names
        return f"'{at}': {str(error['msg']).lower()}, got {error['input']!r}"
    return explain(error | {"loc": (name,)}, owner, "".join(f"{part}." for part in path[:-1]))


def _walk(
    loc: tuple[Any, ...], model: type[BaseModel], raw: Any
) -> tuple[list[str], type[BaseModel], list[type[BaseModel]]]:
    """Return the dotted path, the model of its last table, and those that the value there may be."""
    path: list[str] = []
    value, owner, inner, keyed = raw, model, [model], False
    for part in loc:
        if isinstance(part, int):
            value = value[part]
            path.append(str(value.get("name", part)) if isinstance(value, Mapping) else str(part))
            continue
        tagged = [one for one in inner if part in _tags(one)]
        if len(inner) > 1 and tagged:  # the branch of a union
            inner = tagged
            continue
        path.append(str(part))
        value = value.get(part) if isinstance(value, Mapping) else None
        if keyed or not inner:  # an entry by its name, or the branch of a union of plain types
            keyed = False
            continue
        owner = inner[0]
        field = owner.model_fields.get(part)
        inner = _models(field.annotation) if field is not None else []
        keyed = field is not None and get_origin(field.annotation) is dict
        if field is not None and not inner and not keyed:
            break
    return path, owner, inner


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return all models that an annotation may stand for."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        arguments = arguments[:1]
    if origin in (Annotated, Union, UnionType, tuple, list, dict):
        return [model for argument in arguments for model in _models(argument)]
    return []


def _tags(model: type[BaseModel]) -> list[str]:
    kind = model.model_fields.get("kind")
    return _literals(kind.annotation) if kind is not None else []


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for argument in get_args(annotation) for value in _literals(argument)]


def _choice(at: str, choices: list[str], given: Any) -> str:
    hint = did_you_mean(str(given), choices)
    return f"'{at}' must be one of {choices}, got {given!r}{hint and f'; {hint}'}"
