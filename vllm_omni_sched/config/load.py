"""Read the options of `config.options` once at start-up.

They are given in vLLM's own ``--additional-config '{"omni_sched": {...}}'``, in a YAML file that is named there,
``{"omni_sched": "/etc/omni_sched.yaml"}``, or as the name of a profile: ``{"omni_sched": "chat"}``.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.options import EXPERT_GROUP, OmniSchedConfig, Toggle
from vllm_omni_sched.config.profiles import Profile

KEY = "omni_sched"
_NEAR = 0.85  # similarity above which a key counts as a misspelling of ours
MOST_CHARACTERS = 1 << 20  # bound on a file of options; real files have at most some thousands
MOST_VALUES = 100_000
MOST_NESTED = 64

_Options = TypeVar("_Options", bound=BaseModel)


def load_config(additional_config: Any) -> OmniSchedConfig:
    """Return the options in a vLLM ``additional_config``.

    Raises:
        ConfigError: it is not a mapping, the file that it names cannot be read, or an option is unknown, of the wrong
            type, out of range, or needs another one. The message names the key.
    """
    if additional_config is None:
        return OmniSchedConfig()
    if not isinstance(additional_config, Mapping):
        raise ConfigError(
            f"--additional-config must be a mapping to hold our options, got {type(additional_config).__name__}; "
            f'write it as {{"{KEY}": {{...}}}}'
        )
    for key in additional_config:
        if is_nearly_ours(key):
            raise ConfigError(
                f"additional_config has the unknown key {key!r}; did you mean {KEY!r}? Options of vllm-omni-sched are "
                f"read from {KEY!r} only"
            )
    options = additional_config.get(KEY, {})
    where = f"additional_config[{KEY!r}]"
    profiles = [one.value for one in Profile]
    if isinstance(options, str) and options in profiles:
        options = {"profile": options}
    elif isinstance(options, str) and not (Path(options).suffix or Path(options).exists()):
        hint = did_you_mean(options, profiles) or f"profiles are {', '.join(profiles)}"
        raise ConfigError(f"{where} names {options!r}, which is neither a profile nor a file; {hint}")
    elif isinstance(options, str):
        options, where = read_yaml(options, where), options
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        raise ConfigError(f"{where} must be a mapping of options, a profile or the path of a YAML file, got {kind}")
    config = read_options(OmniSchedConfig, options, where)
    for problem in _contradictions(config):
        raise ConfigError(f"{where}: {problem}")
    return config


def is_nearly_ours(key: Any) -> bool:
    """Return whether a key looks like a misspelling of `KEY`; other keys belong to other plugins."""
    if not isinstance(key, str) or key == KEY:
        return False
    letters = re.sub(r"[^a-z]", "", key.lower()).removeprefix("vllm")
    ours = KEY.replace("_", "")
    return letters.startswith(ours) or difflib.SequenceMatcher(None, letters, ours).ratio() >= _NEAR


def read_options(
    model: type[_Options], options: Mapping[Any, Any], where: str = f"additional_config[{KEY!r}]", *, group: str = ""
) -> _Options:
    """Return the options of a mapping as an instance of ``model``.

    Args:
        model: pydantic model that forbids unknown keys.
        options: the options as the operator wrote them.
        where: the place of the options, for messages; empty if the caller names it.
        group: the key that holds the options, if they are a group in other options.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range. The message names the key.
    """
    prefix = f"{group}." if group else ""
    try:
        return model(**{str(k): v for k, v in options.items()})
    except ValidationError as error:
        problems = "; ".join(explain(one, model, prefix) for one in error.errors())
        raise ConfigError(f"{where}: {problems}" if where else problems) from None


def _contradictions(config: OmniSchedConfig) -> Iterator[str]:
    """Yield a message for each option that lacks another one that it needs."""
    host = config.encoder_cache_host_bytes
    if host and not config.encode_ahead:
        yield (
            f"option 'encoder_cache_host_bytes' is {host}, but encodings are restored through encode-ahead's "
            "connector: set 'encode_ahead' to true, or 'encoder_cache_host_bytes' to 0"
        )
    if host and config.encoder_cache is Toggle.OFF:
        yield (
            "option 'encoder_cache_host_bytes' needs our encoder cache manager: set 'expert.encoder_cache' to 'auto', "
            "or leave 'encoder_cache_host_bytes' out"
        )


NEEDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch_min", "batch_max"), ("batch_control",)),
    "prefill_min_tokens": ("prefill_control",),
    **dict.fromkeys(("control_interval_ms", "control_target_ms"), ("batch_control", "prefill_control")),
    **dict.fromkeys(
        ("encode_lane_cpus", "encode_lane_sms", "encode_lane_min_share", "decode_pace"),
        ("encode_ahead",),
    ),
    **dict.fromkeys(("encode_bytes_per_embed", "encoder_reserve_embeds"), ("kv_lending",)),
    **dict.fromkeys(("encoder_share_wait_seconds", "encoder_share_dir"), ("encoder_share_bytes",)),
    "max_wait_seconds": ("waiting_order", "encode_rounds"),
    **dict.fromkeys(("spill_dir", "spill_max_bytes", "release_batch_items"), ("release",)),
    "history_bytes": ("history_path",),
    "metrics_interval_seconds": ("metrics",),
}
"""Options that have no effect unless one of others is on."""
_OFF = (False, 0, None, "off", "arrival", "keep")


def check_needs(config: OmniSchedConfig) -> None:
    """Check that no option was given that has no effect beside the others.

    The simulator does not: a study varies options, some of which then have none.

    Raises:
        ConfigError: one was.
    """
    values = config.model_dump(mode="json")
    for name, needed in NEEDS.items():
        if name in config.given and all(values[one] in _OFF for one in needed):
            others = " or ".join(repr(written(OmniSchedConfig, one)) for one in needed)
            key = written(OmniSchedConfig, name)
            raise ConfigError(f"option {key!r} has no effect without {others}: turn that on, or leave {key!r} out")


def read_yaml(path: str, named_by: str, only: str | None = None) -> Any:
    """Return the content of a YAML file.

    Args:
        only: the key at the top level whose options are ours, if the rest of the file belongs to another program.

    Raises:
        ConfigError: it cannot be read, is not YAML, is empty, or has a key twice. The message names the file, and
            `named_by` where the file cannot be read.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{named_by} names the file {path!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8; save it in that encoding") from None
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{path}: has {len(text)} characters, but a file of options may have {MOST_CHARACTERS} at most"
        )
    try:
        _refuse_nested(path, text)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _refuse_large(path, root)
        for key, first, again in _twice(root):
            if only is None or key.split(".")[0] == only:
                raise ConfigError(f"{path}: option {key!r} is given twice, in lines {first} and {again}: keep one")
        options = loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if options is None:
        raise ConfigError(f"{path}: is empty; write {{}} for the defaults, or do not name the file")
    return options


def _refuse_nested(path: str, text: str) -> None:
    """Refuse a YAML text that is nested more deeply than any options, before it is parsed recursively."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_NESTED:
                line = event.start_mark.line + 1 if event.start_mark is not None else 0
                raise ConfigError(
                    f"{path}: line {line} is nested more than {MOST_NESTED} levels deep; use fewer levels"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _refuse_large(path: str, root: Any) -> None:
    """Refuse a YAML document that becomes too large or too deep when its aliases are expanded, or contains itself."""
    import yaml

    sizes: dict[int, tuple[int, int]] = {}  # values and depth of each node

    def measure(node: Any, above: frozenset[int]) -> tuple[int, int]:
        if id(node) in above:
            raise ConfigError(f"{path}: an alias in line {node.start_mark.line + 1} contains itself; write it out")
        if id(node) not in sizes:
            inner: list[Any] = []
            if isinstance(node, yaml.SequenceNode):
                inner = node.value
            elif isinstance(node, yaml.MappingNode):
                inner = [one for pair in node.value for one in pair]
            found = [measure(one, above | {id(node)}) for one in inner]
            size, depth = 1 + sum(one for one, _ in found), 1 + max((one for _, one in found), default=0)
            if size > MOST_VALUES or depth > MOST_NESTED:
                raise ConfigError(
                    f"{path}: with its aliases written out it holds more than {MOST_VALUES} values, or is nested more "
                    f"than {MOST_NESTED} levels deep; shorten it"
                )
            sizes[id(node)] = size, depth
        return sizes[id(node)]

    if root is not None:
        measure(root, frozenset())


def _twice(root: Any) -> Iterator[tuple[str, int, int]]:
    """Yield path and both lines of each key that a YAML mapping has twice; YAML would silently use the last.

    1 and "1" count as the same key, because both name a stage.
    """
    import yaml

    todo, seen = [("", root)], set()
    while todo:
        path, node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += [(f"{path}{at}.", one) for at, one in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                yield path + key.value, lines[key.value], line
            lines[key.value] = line
            todo.append((f"{path}{key.value}.", value))


class Source(str, Enum):
    """Where the value of an option comes from."""

    GIVEN = "given"  # the operator set it
    PROFILE = "profile"  # the profile set it
    DEFAULT = "default"


@dataclass(frozen=True)
class ResolvedOption:
    """An option with its value; the operator has set it (``given``), or else the profile has, or it is the default."""

    name: str
    value: Any
    given: bool
    from_profile: bool = False

    def __str__(self) -> str:
        return f"{self.name}={self.shown}"

    @property
    def source(self) -> Source:
        """Return where the value comes from."""
        return Source.GIVEN if self.given else Source.PROFILE if self.from_profile else Source.DEFAULT

    @property
    def shown(self) -> str:
        """Return the value as it is written in YAML."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value)


def resolved(options: BaseModel, *, group: str = "") -> list[ResolvedOption]:
    """Return all options with their values, as the operator would write them.

    Args:
        group: the key that holds the options, if they are a group in other options.
    """
    prefix = f"{group}." if group else ""
    given: Collection[str] = options.model_fields_set
    chosen: Collection[str] = ()
    if isinstance(options, OmniSchedConfig):
        given, chosen = options.given, options.from_profile()
    return [
        ResolvedOption(written(type(options), name, prefix), value, name in given, name in chosen)
        for name, value in options.model_dump(mode="json").items()
    ]


def written(model: type[BaseModel], name: str, prefix: str = "") -> str:
    """Return an option's name as the operator writes it, with its group."""
    field = model.model_fields.get(name)
    in_group = (
        field is not None and isinstance(field.json_schema_extra, dict) and EXPERT_GROUP in field.json_schema_extra
    )
    return f"{prefix}{EXPERT_GROUP}.{name}" if in_group else prefix + name


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as the operator writes them: with a mapping for those of the group ``expert``."""
    outside = {name: value for name, value in options.items() if name not in OmniSchedConfig.expert_names()}
    inside = {name: value for name, value in options.items() if name not in outside}
    return outside | ({EXPERT_GROUP: {**outside.pop(EXPERT_GROUP, {}), **inside}} if inside else {})


def explain(error: Any, model: type[BaseModel], prefix: str = "") -> str:
    """Return one validation error as one sentence with the path of its key, and the fix.

    Args:
        error: an entry of ``ValidationError.errors()``.
        model: the model that was validated.
        prefix: the path of the options in others, with a dot at its end.
    """
    loc, kind, given = tuple(error["loc"]), error["type"], error["input"]
    by_name = loc[-1:] == ("[key]",)  # a mapping whose keys are names, not options
    if by_name or kind == "invalid_key":
        at = (prefix + ".".join(map(str, loc[: -2 if by_name else -1]))).removesuffix(".")
        return (
            (f"option {at!r}: its keys" if at else "names of options")
            + f" must be text, got {given!r}; put it in quotes, or correct it (YAML takes a bare on, off, yes "
            "or no for true or false)"
        )
    problem = str(error["msg"]).removeprefix("Value error, ")
    if not loc or problem.startswith("option"):  # of our own validators, on several options
        at = (prefix + ".".join(map(str, loc))).removesuffix(".")
        return f"in {at!r}: {problem}" if at else problem
    while len(loc) > 1 and (inner := _model_in(model, str(loc[0]))) is not None:
        inside, keyed = inner
        if keyed and len(loc) == 2:  # the entry itself is of the wrong type
            names = ", ".join(inside.model_fields)
            return f"option '{prefix}{loc[0]}.{loc[1]}' must be a mapping of {names}, got {given!r}"
        steps = 2 if keyed else 1
        prefix += "".join(f"{part}." for part in loc[:steps])
        loc, model = loc[steps:], inside
    key = written(model, str(loc[0]), prefix)  # the further parts are the branches of a union, or an entry
    if kind == "extra_forbidden":
        known = {prefix + field: written(model, field, prefix) for field in model.model_fields}
        hint = did_you_mean(key, known, known.__getitem__) or f"known options: {', '.join(known.values())}"
        return f"unknown option {key!r}; {hint}"
    if kind == "missing":
        return f"option {key!r} is missing: {model.model_fields[str(loc[0])].description}"
    if kind in ("model_type", "dict_type"):
        of = _model_in(model, str(loc[0]))
        names = f" of {', '.join(of[0].model_fields)}" if of and not of[1] else ""
        return f"option {key!r} must be a mapping{names}, got {given!r}"
    if members := _members(model.model_fields[str(loc[0])].annotation):
        choices = [member.value for member in members]
        given = given.value if isinstance(given, Enum) else given
        hint = did_you_mean(str(given), choices)
        return f"option {key!r} must be one of {choices}, got {given!r}{hint and f'; {hint}'}"
    bounds = {k: v for k, v in error.get("ctx", {}).items() if k in ("ge", "le")}
    fix = f"; the nearest valid value is {next(iter(bounds.values()))}" if bounds else ""
    got = "" if problem.startswith(repr(given)) else f", got {given!r}"
    return f"option {key!r}: {problem[:1].lower()}{problem[1:]}{got}{fix}"


def _model_in(model: type[BaseModel], name: str) -> tuple[type[BaseModel], bool] | None:
    """Return the model of an option's value, and whether the option is a mapping of such models; else None."""
    field = model.model_fields.get(name)
    annotation: Any = None if field is None else _without_none(field.annotation)
    keyed = get_origin(annotation) is dict
    inner = get_args(annotation)[1] if keyed else annotation
    return (inner, keyed) if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _without_none(annotation: Any) -> Any:
    """Return the type of an option that may also be null."""
    rest = [one for one in get_args(annotation) if one is not NoneType]
    return rest[0] if len(rest) == 1 and NoneType in get_args(annotation) else annotation


def _members(annotation: Any) -> list[Enum]:
    """Return the members of an enum that an option may have: all of them, or those of a ``Literal``."""
    annotation = _without_none(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return list(annotation)
    values = get_args(annotation) if get_origin(annotation) is Literal else ()
    return [value for value in values if isinstance(value, Enum)]
