"""Explain validation errors in one sentence each, with the dotted key that an override would use."""

from collections.abc import Iterator, Mapping
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
    path, owner, name = _walk(tuple(error["loc"]), model, raw)
    path = [within, *path] if within else path
    kind, at = error["type"], ".".join((*path, name) if name else path)
    if kind == "value_error":
        problem = str(error["msg"]).removeprefix("Value error, ")
        return f"in '{at}': {problem}" if at else problem
    if kind == "missing":
        meaning = _description(owner, name).removesuffix(".")
        return f"'{at}' is missing" + (f": {meaning}" if meaning else "")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = str(error["ctx"]["discriminator"]).strip("'")
        if kind == "union_tag_not_found":
            return f"'{at}.{key}' is missing: one of {_tags(owner, name, key)}"
        return _choice(f"{at}.{key}", _tags(owner, name, key), error["ctx"]["tag"])
    if kind == "literal_error":
        return _choice(at, _literals(owner.model_fields[name].annotation), error["input"])
    if kind == "extra_forbidden":
        return _unknown(path, name, list(owner.model_fields))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"'{at}' must be a table, got {error['input']!r}"
    if kind == "tuple_type":
        return f"'{at}' must be a list of tables, [[{at}]], got {error['input']!r}"
    if kind == "string_pattern_mismatch":
        return f"'{at}' must be of letters, digits, '_' and '-', got {error['input']!r}"
    prefix = "".join(f"{part}." for part in path)
    if name not in owner.model_fields:  # the entry of a mapping by names
        return f"'{at}': {str(error['msg']).lower()}, got {error['input']!r}"
    return explain(error | {"loc": (name,)}, owner, prefix)


def _walk(loc: tuple[Any, ...], model: type[BaseModel], raw: Any) -> tuple[list[str], type[BaseModel], str]:
    """Return the path of the tables, the model of the innermost one, and the key in it ("" for itself)."""
    path: list[str] = []
    name, value = "", raw
    annotation: Any = None
    for depth, part in enumerate(loc):
        inner = _models(annotation) if annotation is not None else []
        if isinstance(part, int):
            value = value[part]
            path.append(name)
            name = str(value.get("name", part)) if isinstance(value, Mapping) else str(part)
            continue
        tagged = [one for one in inner if part in _all_tags(one)]
        if tagged and len(inner) > 1:  # the branch of a union
            model, annotation = tagged[0], None
            path, name = [*path, name], ""
            continue
        if annotation is not None and len(inner) == 1:
            keyed = get_origin(annotation) is dict
            path.append(name)
            if keyed:
                name, value, annotation = str(part), _inside(value, part), inner[0]
                continue
            model = inner[0]
        elif name:
            path.append(name)
        name = str(part)
        value = _inside(value, part)
        field = model.model_fields.get(name)
        annotation = field.annotation if field is not None else None
        if field is not None and not _models(annotation):
            if get_origin(annotation) is dict and depth + 1 < len(loc):  # by names, of plain values
                return [*path, name], model, str(loc[depth + 1])
            break  # what follows are branches of a union of plain types
    return path, model, name


def _inside(value: Any, part: Any) -> Any:
    return value.get(part) if isinstance(value, Mapping) else None


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


def _all_tags(model: type[BaseModel]) -> Iterator[str]:
    for field in model.model_fields.values():
        if get_origin(field.annotation) is Literal and field.is_required():
            yield from map(str, get_args(field.annotation))


def _tags(owner: type[BaseModel], name: str, key: str) -> list[str]:
    """Return the values of the discriminator; `owner` may be the model with the list, one step further out."""
    field = owner.model_fields.get(name) or owner.model_fields["stages"]
    models = _models(field.annotation)
    return [str(get_args(model.model_fields[key].annotation)[0]) for model in models]


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for argument in get_args(annotation) for value in _literals(argument)]


def _choice(at: str, choices: list[str], given: Any) -> str:
    hint = did_you_mean(str(given), choices)
    return f"'{at}' must be one of {choices}, got {given!r}{hint and f'; {hint}'}"


def _unknown(path: list[str], name: str, known: list[str]) -> str:
    prefix = "".join(f"{part}." for part in path)
    hint = did_you_mean(name, known, lambda one: prefix + one) or f"known: {', '.join(known)}"
    return f"unknown option '{prefix}{name}'; {hint}"


def _description(owner: type[BaseModel], name: str) -> str:
    field = owner.model_fields.get(name)
    return (field.description or "") if field is not None else ""
