"""Files with options of the stage scheduler: good ones, and ones that must be refused, with what is said then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


def deploy(folder: Path, text: str, name: str = "deploy.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@dataclass(frozen=True)
class StageFile:
    """Options of the stage scheduler in the deploy YAML of a pipeline of thinker, talker and vocoder.

    Where `{folder}` stands, it is replaced by a folder with `files`.

    ``says``: what its refusal must hold, of which the first is the key; empty for a good file. ``alone``: it is refused
    without the deploy YAML, too. ``stages``: keys for stages of the deploy YAML, by their ids.
    """

    options: str
    says: tuple[str, ...] = ()
    alone: bool = True
    key: str = "omni_sched"
    files: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[int, Mapping[str, object]] = field(default_factory=dict)


def _connector(extra: str, name: str = "ArenaConnector") -> str:
    return f"{{runtime: {{connectors: {{a: {{name: {name}, extra: {extra}}}}}}}}}"


def _edges(**edges: str) -> str:
    named = ", ".join(f"{key.replace('_', '->')}: {name}" for key, name in edges.items())
    connectors = {
        name: f"{name}: {{name: ArenaConnector, extra: {{put_timeout_seconds: {len(name)}}}}}"
        for name in edges.values()
    }
    return f"{{runtime: {{connectors: {{{', '.join(connectors.values())}}}, edges: {{{named}}}}}}}"


PARTITION = "{graph: {partition: {enabled: true, devices: {0: {memory_bytes: 1MB}}, profiles: {%s}}}}"
NEEDS = ", ".join(
    f"{name}: {{memory_bytes: {size}, seconds: 1}}"
    for name, size in (("thinker", "2MB"), ("talker", 1), ("vocoder", 1))
)

REFUSED: Mapping[str, StageFile] = {
    # names and values
    "unknown section": StageFile("{batchin: {}}", ("batchin", "did you mean 'batching'?")),
    "unknown option": StageFile("{runtime: {stall_second: 3}}", ("runtime.stall_second", "'runtime.stall_seconds'?")),
    "wrong type": StageFile("{runtime: {credits: {capacity: many}}}", ("runtime.credits.capacity", "'many'")),
    "out of range": StageFile("{runtime: {drain_seconds: -1}}", ("runtime.drain_seconds", "greater than 0")),
    "no size": StageFile("{pools: {text_pool_size: 2 GBytes}}", ("pools.text_pool_size", "'2 GBytes' is not a size")),
    "no class": StageFile("{graph: {priority: {default_class: vip}}}", ("default_class", "'vip'")),
    "a key twice": StageFile(
        "ours.yaml",
        ("option 'pools' is given twice", "ours.yaml"),
        alone=False,
        files={"ours.yaml": "pools: {}\npools: {}\n"},
    ),
    "a number": StageFile("3", ("must be a mapping of options", "got int")),
    "no such file": StageFile("none.yaml", ("none.yaml", "cannot be read"), alone=False),
    "an empty file": StageFile(
        "ours.yaml", ("ours.yaml", "is empty; write {}"), False, files={"ours.yaml": "# none\n"}
    ),
    "a key nearly ours": StageFile("{}", ("'omnisched' is unknown", "'omni_sched'?"), alone=False, key="omnisched"),
    "no address": StageFile("{runtime: {hosts: {standby: [not a host]}}}", ("runtime.hosts.standby", "'not a host'")),
    "no address of a link": StageFile(
        "{runtime: {hosts: {links: {a/b: 1}}}}", ("runtime.hosts.links", "'a/b' is no addr")
    ),
    "nothing notices hangs": StageFile(
        "{runtime: {recovery: {hang_seconds: 9}}, monitoring: {enabled: false}}",
        ("runtime.recovery.hang_seconds", "'monitoring.enabled'"),
    ),
    # places
    "journal in no folder": StageFile(
        "{monitoring: {journal: {path: '{folder}/none/f.jsonl'}}}",
        ("monitoring.journal.path", "No such file or direct"),
    ),
    "journal is a folder": StageFile(
        "{monitoring: {journal: {path: '{folder}'}}}", ("monitoring.journal.path", "is not a file of this user")
    ),
    "history in no folder": StageFile(
        "{monitoring: {forecast: {enabled: true, history_path: /proc/none/a.json}}}",
        ("monitoring.forecast.history_path", "'/proc/none'"),
    ),
    "arena in no folder": StageFile(
        _connector("{directory: '{folder}/none'}"),
        ("runtime.connectors.a.extra.directory", "No such file or directory"),
    ),
    "disk in no folder": StageFile(
        _connector("{tiers: {disk: {directory: '{folder}/none'}}}", "OmniAutoConnector"),
        ("runtime.connectors.a.extra.tiers.disk.directory", "No such file or directory"),
    ),
    # connectors
    "no such connector": StageFile(
        _connector("{}", "ArenaConector"), ("runtime.connectors.a.name", "did you mean 'ArenaConnector'?")
    ),
    "unknown option of a connector": StageFile(
        _connector("{ring_byte: 5}"), ("runtime.connectors.a.extra.ring_byte", "extra.ring_bytes'?")
    ),
    "unknown option of a pool": StageFile(
        _connector("{text: {initial_byte: 1MB}}"),
        ("runtime.connectors.a.extra.text.initial_byte", "text.initial_bytes'?"),
    ),
    "sizes that contradict": StageFile(
        _connector("{text: {initial_bytes: 2GB, max_bytes: 1GB}}"),
        ("runtime.connectors.a.extra.text", "max_bytes (1073741824) must be at least initial_bytes (2147483648)"),
    ),
    "no room for the ring": StageFile(
        _connector("{ring_bytes: 4KB}"), ("runtime.connectors.a.extra.ring_bytes", "nearest valid value is 65536")
    ),
    "watch out of range": StageFile(
        _connector("{stall_seconds: -1}"), ("runtime.connectors.a.extra.stall_seconds", "greater than 0")
    ),
    "device memory without an arena": StageFile(
        _connector("{arena: null, cuda_ipc: {}}", "OmniAutoConnector"),
        ("'cuda_ipc' needs the arena", ".connectors.a.extra"),
    ),
    "no transport": StageFile(
        _connector("{arena: null}", "OmniAutoConnector"), ("'arena' is null", "runtime.connectors.a.extra")
    ),
    "a transport that is not there": StageFile(
        _connector("{edges: {0->1: [mooncake]}}", "OmniAutoConnector"), ("edges.0->1", "there are ['arena']")
    ),
    "tiers without any": StageFile(
        _connector("{tiers: {disk: null}}", "OmniAutoConnector"),
        ("name a tier, `disk` or `mooncake`", "runtime.connectors.a.extra"),
    ),
    "no such foreign connector": StageFile(
        _connector("{foreign: {x: {name: NixConnector}}}", "OmniAutoConnector"),
        ("runtime.connectors.a.extra.foreign.x.name", "no connector 'NixConnector'"),
    ),
    "no such codec": StageFile(
        _connector("{compression: {edges: {0->1: {lossy: int4}}}}", "OmniAutoConnector"),
        ("runtime.connectors.a.extra.compression.edges.0->1.lossy", "'int4'"),
    ),
    "two arenas for all edges": StageFile(
        "{runtime: {connectors: {a: {name: ArenaConnector}, b: {name: ArenaConnector}}}}",
        ("runtime.connectors.b", "keep one"),
    ),
    "pools of no connector": StageFile("{text_pool_size: 1MB}", ("pools.text_pool_size", "add one, such as")),
    # edges
    "from a stage to itself": StageFile(_edges(talker_talker="a"), ("edges.talker->talker", "must name two stages")),
    "a circle": StageFile(
        _edges(thinker_talker="a", talker_thinker="a"), ("'edges'", "is a circle, so that no stage of it could start")
    ),
    "two connectors of a stage": StageFile(
        _edges(thinker_talker="a", talker_vocoder="bb"),
        ("runtime.edges", "thinker->talker and talker->vocoder must have"),
    ),
    "an edge of no connector": StageFile(
        "{runtime: {connectors: {a: {name: ArenaConnector}}, edges: {thinker->talker: b}}}",
        ("edges.thinker->talker", "'b'"),
    ),
    # what only the pipeline tells
    "no such stage": StageFile(
        "{batching: {stages: {taker: {hold_ms: 1}}}}", ("batching.stages.taker", "'talker'?"), False
    ),
    "no such profile": StageFile(
        PARTITION % NEEDS.replace("talker", "taker"), ("graph.partition.profiles.taker",), False
    ),
    "an edge of no stage": StageFile(_edges(thinker_taker="a"), ("runtime.edges.thinker->taker", "'talker'?"), False),
    "no such edge": StageFile(
        _edges(thinker_vocoder="a"), ("runtime.edges.thinker->vocoder", "it has 0->1, 1->2"), False
    ),
    "no room": StageFile(PARTITION % NEEDS, ("stage 0 lacks",), False, stages={n: {"devices": "0"} for n in range(3)}),
    "more than the stage takes": StageFile(
        "{batching: {stages: {talker: {min_batch_size: 9, target_latency_ms: 50}}}}",
        ("batching.stages.talker.min_batch_size", "'max_num_seqs' of stage talker (1) in the deploy YAML (8)"),
        alone=False,
    ),
    "another connector in the deploy YAML": StageFile(
        _connector("{}"),
        ("runtime.connectors", "the deploy YAML has SharedMemoryConnector"),
        alone=False,
        stages={0: {"output_connectors": {"to_stage_1": "c"}}, 1: {"input_connectors": {"from_stage_0": "c"}}},
    ),
}

GOOD: Mapping[str, StageFile] = {
    "defaults": StageFile("{}"),
    "nothing": StageFile(""),
    "off": StageFile("false"),
    "a file of its own": StageFile("ours.yaml", files={"ours.yaml": "{}\n"}),
    "all options of the documents": StageFile(
        "ours.yaml",
        files={"ours.yaml": (ROOT / "docs" / "examples" / "stages.yaml").read_text().replace("code2wav", "vocoder")},
    ),
    "the deployment's": StageFile(
        "ours.yaml", files={"ours.yaml": (ROOT / "examples" / "omni_sched.yaml").read_text()}
    ),
    "a journal": StageFile("{monitoring: {journal: {path: '{folder}/faults.jsonl'}}}"),
    "sizes with units": StageFile(_connector("{ring_bytes: 1MB, text: {initial_bytes: 1MiB, max_bytes: 4mb}}")),
    "what models keep beside ours": StageFile(_connector("{codec_chunk_frames: 25, stall_seconds: 3}")),
    "standby": StageFile(
        "{runtime: {hosts: {standby: [10.0.0.2, node-7.cluster, 'fe80::1'], links: {10.0.0.2: 1GB}}}}"
    ),
    "disjoint edges": StageFile(_edges(thinker_talker="a", talker_vocoder="a")),
}
