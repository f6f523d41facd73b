"""Start-ups that must be refused. `python -m tests.engine.harness.refusals MODEL FOLDER` tries each.

All of them are tried in one process, and only as far as vLLM's configuration: no engine is started.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from tests.engine.harness.spec import OURS, OURS_SYNC


@dataclass(frozen=True)
class Case:
    """`says`: what the error's text must hold. `args`: more fields of vLLM's `EngineArgs`.

    Where `{folder}` stands, it is replaced by a folder with `files`.
    """

    additional_config: Any
    says: Sequence[str]
    error: str = "ConfigError"
    scheduler: str | None = OURS
    files: Mapping[str, str] = field(default_factory=dict)
    circumstance: str = "none"
    args: Mapping[str, Any] = field(default_factory=dict)


class Hashable:
    """An `additional_config` that is no mapping, but that vLLM accepts."""

    def compute_hash(self) -> str:
        return "0"


def architecture(name: str) -> dict[str, Any]:
    """Return the arguments of an engine with a model of `models.py`."""
    return {"hf_overrides": {"architectures": [name]}}


def _options(**options: Any) -> dict[str, Any]:
    return {"omni_sched": options}


LENDING = _options(encode_ahead=True, kv_lending=0.5, expert={"encode_bytes_per_embed": 45_000})
NO_LENDING = "option 'kv_lending' cannot be on in this engine"

REFUSED = {
    "unknown-option": Case(_options(sesion_delta="off"), ["'sesion_delta'", "did you mean 'expert.session_delta'?"]),
    "wrong-type": Case(_options(release_batch_items="many"), ["'expert.release_batch_items'", "'many'"]),
    "two-errors": Case(_options(release="spil", zzz=1), ["'release'", "'zzz'"]),
    "options-are-a-list": Case({"omni_sched": ["windows"]}, ["omni_sched", "must be a mapping", "list"]),
    "no-such-file": Case({"omni_sched": "{folder}/none.yaml"}, ["/none.yaml'", "No such file"]),
    "file-is-a-folder": Case({"omni_sched": "{folder}"}, ["cannot be read", "Is a directory"]),
    "file-is-not-yaml": Case(
        {"omni_sched": "{folder}/options.yaml"},
        ["options.yaml", "not valid YAML", "line 1"],
        files={"options.yaml": "windows: [off"},
    ),
    "unknown-option-in-a-file": Case(
        {"omni_sched": "{folder}/options.yaml"},
        ["options.yaml", "did you mean 'expert.windows'?"],
        files={"options.yaml": "windws: off\n"},
    ),
    "not-a-mapping": Case(["omni_sched"], ["additional_config", "valid dictionary"], error="ValidationError"),  # vLLM's
    "an-object": Case(
        None, ["--additional-config must be a mapping", "Hashable"], circumstance="an object that vLLM would take"
    ),
    "a-key-nearly-ours": Case({"omnisched": {"windows": "off"}}, ["'omnisched'", "did you mean 'omni_sched'?"]),
    "a-class-for-clients-that-is-none": Case(_options(client_classes=["vip"]), ["'client_classes'", "realtime, inter"]),
    "options-are-null": Case({"omni_sched": None}, ["omni_sched", "must be a mapping", "NoneType"]),
    "sync-under-async": Case(
        _options(),
        ["OmniSyncScheduler", "async scheduling is on", "vllm_omni_sched.OmniScheduler"],
        scheduler=OURS_SYNC,
        circumstance="async scheduling",
    ),
    "host-tier-of-a-cache-that-is-not": Case(
        _options(encode_ahead=True, encoder_cache_host_bytes=1),
        ["'encoder_cache_host_bytes'", "encoder-decoder model", "Leave 'encoder_cache_host_bytes' out"],
        circumstance="an encoder-decoder model",
    ),
    "no-lane-beside-this-model": Case(
        _options(encode_ahead=True),
        ["'encode_ahead' cannot be on here", "LlavaThatSetsContext sets vLLM's forward context", "set it to false"],
        circumstance="a GPU",
        args=architecture("LlavaThatSetsContext"),
    ),
    "no-lane-beside-this-attention": Case(
        _options(profile="chat", encode_ahead=True),
        ["'encode_ahead' cannot be on here", "FlashInfer", "choose another --mm-encoder-attn-backend"],
        circumstance="a GPU",
        args={"mm_encoder_attn_backend": "FLASHINFER"},
    ),
    "lending-without-the-lane": Case(
        _options(kv_lending=0.5), [NO_LENDING, "only the lane of encode-ahead borrows blocks"]
    ),
    "lending-with-tensor-parallelism": Case(
        LENDING, [NO_LENDING, "each of 2 workers", "--tensor-parallel-size to 1"], args={"tensor_parallel_size": 2}
    ),
    "lending-with-pipeline-parallelism": Case(
        LENDING,
        [NO_LENDING, "only the first has the encoder", "--pipeline-parallel-size"],
        args={"pipeline_parallel_size": 2},
    ),
    "lending-with-runner-v2": Case(
        LENDING, [NO_LENDING, "model runner V2", "VLLM_USE_V2_MODEL_RUNNER"], circumstance="model runner V2"
    ),
    "lending-with-a-kv-connector": Case(
        LENDING,
        [NO_LENDING, "'ExampleConnector'", "leave out --kv-transfer-config"],
        args={"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    ),
    "lending-with-client-embeddings": Case(
        LENDING, [NO_LENDING, "leave out --enable-mm-embeds"], args={"enable_mm_embeds": True}
    ),
    "lending-with-sleep-mode": Case(  # vLLM's own: no CPU sleeps
        LENDING, ["Sleep mode is not supported"], error="ValidationError", args={"enable_sleep_mode": True}
    ),
    "unsupported-vllm": Case(
        _options(),
        ["supports vLLM", "0.30", "0.32", "found 0.29.1"],
        error="UnsupportedVllmError",
        circumstance="vLLM 0.29.1",
    ),
    "cannot-work-here": Case(
        _options(windows="on"),
        ["'windows'", "cannot work", "Scheduler._try_schedule_encoder_inputs", "'auto' or 'off'"],
        error="MissingSymbolError",
        circumstance="a method is gone",
    ),
}

TWICE: dict[str, Case] = {
    "spill-in-no-folder": Case(_options(spill_dir="{folder}/none"), ["'spill_dir'", "No such file or directory"]),
    "spill-into-a-file": Case(_options(spill_dir="{folder}/f"), ["'spill_dir'", "Not a directory"], files={"f": ""}),
    "history-in-no-folder": Case(
        _options(expert={"history_path": "/proc/none/h.jsonl"}), ["'expert.history_path'", "'/proc/none'"]
    ),
    "history-is-a-folder": Case(
        _options(expert={"history_path": "{folder}"}), ["'expert.history_path'", "is not a file of this user"]
    ),
    "share-in-no-folder": Case(
        _options(encoder_share_bytes="1MB", expert={"encoder_share_dir": "/nope"}),
        ["'expert.encoder_share_dir'", "'/nope'"],
    ),
    "processors-that-are-not-there": Case(
        _options(profile="chat", encode_lane_cpus="9990-9992"), ["'encode_lane_cpus'", "9990,9991,9992", "may use"]
    ),
    "multiprocessors-of-a-cpu": Case(
        _options(encode_ahead=True, expert={"encode_lane_sms": 8}), ["'expert.encode_lane_sms'", "not 'cpu'"]
    ),
    "least-of-no-control": Case(
        _options(expert={"batch_min": 2}), ["'expert.batch_min'", "no effect without 'expert.batch_control'"]
    ),
    "target-of-no-control": Case(
        _options(control_target_ms=40), ["'control_target_ms'", "'expert.batch_control' or 'prefill_control'"]
    ),
    "a-lane-that-is-off": Case(
        _options(profile="chat", encode_ahead=False, expert={"decode_pace": 1}),
        ["'expert.decode_pace'", "no effect without 'encode_ahead'"],
    ),
    "spill-and-keep": Case(_options(release="keep", spill_max_bytes="1GB"), ["'spill_max_bytes'", "'release'"]),
    "lending-of-nothing-known": Case(
        _options(encode_ahead=True, kv_lending=0.5), [NO_LENDING, "encode_bytes_per_embed"]
    ),
    "pool-misspelt": Case(_options(preprocess={"procs": 2}), ["'preprocess.procs'", "'preprocess.processes'?"]),
    "video-misspelt": Case(_options(video={"decoder": 2}), ["'video.decoder'", "'video.decoders'?"]),
    "no-decoders": Case(_options(video={"decoders": 0}), ["'video.decoders'", "from 1 to 1024"]),
    "no-gpu-decodes": Case(_options(video={"nvdec": "on"}), ["'nvdec' is 'on'", "no GPU decoder can be used here"]),
    "both-exclude-each-other": Case(_options(encode_rounds=True, encode_ahead=True), ["'encode_rounds'", "exclude"]),
    "a-key-twice": Case(
        {"omni_sched": "{folder}/o.yaml"}, ["'release' is given twice"], files={"o.yaml": "release: keep\n" * 2}
    ),
}
"""Options that ``doctor`` refuses with the same words, since no model is needed to see it."""
NEED_NO_MODEL = [
    *("unknown-option", "wrong-type", "two-errors", "options-are-a-list", "no-such-file"),
    *("file-is-not-yaml", "unknown-option-in-a-file", "a-key-nearly-ours", "lending-without-the-lane"),
]
REFUSED |= TWICE

ACCEPTED = {
    "profile-beside-this-model": Case(
        {"omni_sched": "chat"}, [], circumstance="a GPU", args=architecture("LlavaThatSetsContext")
    ),
    "profile-beside-this-attention": Case(
        {"omni_sched": "chat"}, [], circumstance="a GPU", args={"mm_encoder_attn_backend": "FLASHINFER"}
    ),
    "this-model-on-a-cpu": Case(_options(encode_ahead=True), [], args=architecture("LlavaThatSetsContext")),
    "no-options": Case(None, []),
    "yaml-with-bare-off": Case(
        {"omni_sched": "{folder}/options.yaml"},
        [],
        files={"options.yaml": "windows: off\nrelease: keep  # bare off is false in YAML\n"},
    ),
    "cannot-work-here-but-need-not": Case(_options(windows="auto"), [], circumstance="a method is gone"),
    "sync-by-name": Case(_options(), [], scheduler=OURS_SYNC),
    "lending": Case(LENDING, []),
    "places-that-are-there": Case(
        _options(spill_dir="{folder}", spill_max_bytes="4GB", expert={"history_path": "{folder}/h.jsonl"}), []
    ),
    "a-lane-on-a-processor": Case(_options(encode_ahead=True, encode_lane_cpus="{cpu}"), []),
    "lending-with-data-parallelism": Case(LENDING, [], args={"data_parallel_size": 2}),
}


OURS_LOADER = {"media_io_kwargs": {"video": {"video_backend": "omni_flashcodec"}}}
STOCK = "vllm.v1.core.sched.scheduler.Scheduler"
WARNED = {
    "a-profile-alone": Case({"omni_sched": "chat"}, ["(chat)"], scheduler=None),
    "the-profile-of-videos-alone": Case({"omni_sched": "video"}, ["(video)"], scheduler=None),
    "options-alone": Case(_options(encode_ahead=True, release="keep"), ["(encode_ahead, release)"], scheduler=None),
    "defaults-alone": Case(_options(), ["(defaults)"], scheduler=None),
    "a-file-alone": Case({"omni_sched": "none.yaml"}, ["(none.yaml)"], scheduler=None),
    "wrong-options-alone": Case(_options(release="spil"), ["(release)"], scheduler=None),
    "another-scheduler": Case(_options(release="keep"), ["(release)"], scheduler=STOCK),
    "the-parent-of-several": Case(
        _options(release="keep"), ["(release)"], scheduler=None, args={"_api_process_count": 2, "_api_process_rank": -1}
    ),
    "more-than-the-loader-s": Case(
        _options(video={"decoders": 1}, release="keep"), ["(release)"], scheduler=None, args=OURS_LOADER
    ),
}
UNWARNED = {
    "none-of-ours": Case({"another_plugin": [1]}, [], scheduler=None),
    "nothing": Case(None, [], scheduler=None),
    "with-the-scheduler": Case(_options(release="keep"), []),
    "the-loader-s": Case(_options(video={"decoders": 1}), [], scheduler=None, args=OURS_LOADER),
    "one-of-several": Case(
        _options(release="keep"), [], scheduler=None, args={"_api_process_count": 2, "_api_process_rank": 0}
    ),
}


class Warnings(logging.Handler):
    """Keeps what our package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def warnings(case: Case, model: str, folder: Path) -> list[str]:
    """Return what is warned of while vLLM makes its configuration."""
    from vllm_omni_sched.engine.video import service
    from vllm_omni_sched.logs import LOGGER

    handler = Warnings()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        with mock.patch.object(service, "get"):  # no decoders
            refused = outcome(case, model, folder)
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    return handler.said if refused is None else [refused["message"]]


def options_of(case: Case, folder: Path) -> Any:
    """Return the `additional_config` of a case."""
    text = json.dumps(case.additional_config).replace("{folder}", str(folder))
    return json.loads(text.replace("{cpu}", str(min(os.sched_getaffinity(0)))))


def doctor(case: Case, folder: Path) -> list[str]:
    """Return what ``vllm-omni-sched doctor`` refuses, by a folder in which `outcome` has written the files."""
    from vllm_omni_sched.cli.diagnosis import diagnose

    return diagnose(options_of(case, folder)).problems


def outcome(case: Case, model: str, folder: Path) -> dict[str, str] | None:
    """Return what `create_engine_config` raised, or None if it made a config."""
    from vllm.engine.arg_utils import EngineArgs

    for name, text in case.files.items():
        (folder / name).write_text(text)
    args: dict[str, Any] = {"model": model, "dtype": "float32", "max_model_len": 1024, **case.args}
    if case.scheduler is not None:
        args["scheduler_cls"] = case.scheduler
    if isinstance(args.get("kv_transfer_config"), Mapping):
        from vllm.config import KVTransferConfig

        args["kv_transfer_config"] = KVTransferConfig(**args["kv_transfer_config"])
    if case.additional_config is not None:
        args["additional_config"] = options_of(case, folder)
    try:
        with _circumstance(case.circumstance, args):
            EngineArgs(**args).create_engine_config()
    except Exception as error:  # noqa: BLE001  the test says which it must be
        return {"error": type(error).__name__, "message": str(error)}
    return None


@contextmanager
def _circumstance(name: str, args: dict[str, Any]) -> Iterator[None]:
    from vllm.v1.core.sched.scheduler import Scheduler

    if name == "async scheduling":
        from tests.engine.harness.async_on_cpu import async_scheduling_on_cpu

        with async_scheduling_on_cpu():
            yield
    elif name == "an object that vLLM would take":
        args["additional_config"] = Hashable()
        yield
    elif name == "a method is gone":
        method = Scheduler._try_schedule_encoder_inputs
        del Scheduler._try_schedule_encoder_inputs
        try:
            yield
        finally:
            Scheduler._try_schedule_encoder_inputs = method
    elif name == "an encoder-decoder model":
        with mock.patch("vllm.config.ModelConfig.is_encoder_decoder", True):
            yield
    elif name == "model runner V2":
        from vllm.config import vllm as configs

        v2 = mock.patch.object(configs.VllmConfig, "use_v2_model_runner", True)
        with v2, mock.patch.object(configs, "HAS_TRITON", True):
            yield
    elif name == "a GPU":
        from vllm_omni_sched.engine import start

        check = start.check_and_attach

        def check_for_a_gpu(vllm_config: Any) -> None:
            vllm_config.device_config.device_type = "cuda"  # which vLLM has not made of this machine
            check(vllm_config)

        with mock.patch.object(start, "check_and_attach", check_for_a_gpu):
            yield
    elif name == "vLLM 0.29.1":
        with mock.patch("vllm.__version__", "0.29.1"):
            yield
    else:
        yield


def main(model: str, folder: str) -> None:
    import_module("tests.engine.harness.models")
    results: dict[str, Any] = {}
    for name, case in (REFUSED | ACCEPTED | WARNED | UNWARNED).items():
        own = Path(folder) / name
        own.mkdir()
        results[name] = (warnings if name in WARNED | UNWARNED else outcome)(case, model, own)
        if name in NEED_NO_MODEL or name in TWICE or (name in ACCEPTED and case.circumstance == "none"):
            results[f"doctor of {name}"] = doctor(case, own)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
