"""What the preprocessing pool needs of vLLM's renderer, of its multimodal processors and of its decoder of pictures."""

import contextlib
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from vllm_omni_sched.compat import modules

_PREFIX = "vllm.entrypoints.openai."
SERVING_METHODS = (
    (f"{_PREFIX}chat_completion.serving", "OpenAIServingChat.create_chat_completion"),
    (f"{_PREFIX}completion.serving", "OpenAIServingCompletion.create_completion"),
    (modules.RESPONSES, "OpenAIServingResponses.create_responses"),
)
"""Methods of the server that get a request with its extra arguments: module, and dotted path in it."""


def why_no_preprocessing() -> str | None:
    """Return why this vLLM cannot use the preprocessing pool; None if it can."""
    apply = modules.find(modules.MM_PROCESSOR, "BaseMultiModalProcessor._apply_hf_processor_main")
    if apply is None or len(inspect.signature(apply).parameters) != 3:
        return "this vLLM's processors call the HF processor with the prompt"
    for module, path in (
        (modules.RENDERER, "BaseRenderer._process_multimodal"),
        (modules.MM_PROCESSOR, "BaseMultiModalProcessor._get_cache_missing_items"),
        (modules.IMAGE_IO, "ImageMediaIO.load_bytes"),
        (modules.MM_PARSE, "normalize_image"),
    ):
        if not modules.has(module, path):
            return f"this vLLM has no {module}.{path}"
    return None


def renderer_class() -> Any:
    """Return the base class of vLLM's renderers, which prepare requests in the API process."""
    return import_module(modules.RENDERER).BaseRenderer


def mm_renderer_class() -> Any:
    """Return the base class of vLLM's renderers, if it prepares multimodal items; else None."""
    found = modules.find(modules.RENDERER, "BaseRenderer")
    return found if hasattr(found, "_process_multimodal") and hasattr(found, "mm_processor_cache") else None


def sender_cache_class() -> Any:
    """Return the class that knows in the API process which items the engine core has; None if there is none here."""
    for module, name in (
        ("vllm.multimodal.cache.lru", "LruKeyReplicatedSenderCache"),  # 0.33
        ("vllm.multimodal.cache", "MultiModalProcessorSenderCache"),
    ):
        if hasattr(found := modules.find(module, name), "invalidate"):
            return found
    return None


def request_senders() -> list[tuple[Any, str]]:
    """Return the methods by which requests are sent to the engine core: class and name."""
    classes = ("InprocClient", "SyncMPClient", "AsyncMPClient", "DPAsyncMPClient")
    clients = [modules.find(modules.CORE_CLIENT, name) for name in classes]
    names = "add_request", "add_request_async"
    return [(client, name) for client in clients for name in names if client is not None and name in vars(client)]


def image_media_io() -> Any:
    """Return the class of vLLM that decodes pictures."""
    return import_module(modules.IMAGE_IO).ImageMediaIO


def parse_module() -> Any:
    """Return the module of vLLM that sorts the items of a request by type, and turns pictures upright."""
    return import_module(modules.MM_PARSE)


def upright_modules() -> list[Any]:
    """Return the modules of vLLM that call their own ``normalize_image``, which turns pictures upright."""
    return [one for one in map(import_module, (modules.IMAGE_IO, modules.MM_PARSE)) if hasattr(one, "normalize_image")]


def media_with_bytes(media: Any, data: bytes, io_config: dict[str, Any] | None) -> Any:
    """Return a picture together with the bytes that it was decoded from."""
    return import_module(modules.MEDIA_BASE).MediaWithBytes(media, data, io_config)


def admits_picture(media_io: Any, width: int, height: int) -> bool:
    """Return whether vLLM accepts a picture of this size, and charge it to the budget of its request (0.33).

    Raises:
        ValueError: the budget of its request is exceeded.
    """
    limit = import_module("vllm.envs").VLLM_MAX_IMAGE_PIXELS
    if 0 < limit < width * height:
        return False
    budget = getattr(media_io, "decoded_budget", None)
    if budget is not None:
        budget.charge(width * height * 4)
    return True


def processors_of(renderer: Any) -> list[Any]:
    """Return the multimodal processors of a renderer; before 0.33 there is a second one for requests without cache."""
    found = (renderer.mm_processor, getattr(renderer, "_readonly_mm_processor", None))
    return [one for one in found if one is not None]


def load_hf_processor(processor: Any) -> None:
    """Load the HF processor of a model into vLLM's cache of processors; without effect if the model has none."""
    with contextlib.suppress(Exception):  # vLLM reports it when it needs the processor
        processor.info.get_hf_processor()


def default_torch_threads() -> AbstractContextManager[None]:
    """Return a context with as many threads of torch as vLLM uses for preprocessing."""
    context: AbstractContextManager[None] = import_module("vllm.utils.torch_utils").set_default_torch_num_threads()
    return context


def device_is_initialized() -> bool:
    """Return whether this process uses a GPU, which none of its forks can."""
    torch: Any = import_module("torch")
    return any(one is not None and one.is_initialized() for one in (torch.cuda, getattr(torch, "xpu", None)))


def missing_items(
    renderer: Any,
    prompt: Any,
    mm_data: Any,
    mm_uuids: Any,
    mm_processor_kwargs: Mapping[str, object] | None,
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    *,
    skip_mm_cache: bool = False,
) -> tuple[Any, Mapping[str, object]]:
    """Return which items of a request no cache has, without a change to the cache.

    The arguments are those of ``BaseRenderer._process_multimodal``.

    Returns:
        The items, and the arguments of the HF processor.

    Raises:
        Exception: whatever vLLM raises for these items.
    """
    processor = renderer.get_mm_processor()
    if hasattr(renderer, "_mm_processor_only_cache"):  # 0.33
        cache = renderer._mm_processor_only_cache if skip_mm_cache else renderer._mm_processor_cache
    else:
        if skip_mm_cache and renderer._readonly_mm_processor is not None:
            processor = renderer._readonly_mm_processor
        cache = processor.cache
    hf_kwargs = mm_processor_kwargs or {}
    items = processor.info.parse_mm_data(mm_data)
    if cache is None:
        return items, hf_kwargs
    inputs = import_module(modules.MM_PROCESSING).ProcessorInputs(
        prompt,
        items,
        parse_module().parse_mm_uuids(mm_uuids),
        hf_processor_mm_kwargs=hf_kwargs,
        media_io_kwargs=media_io_kwargs or {},
    )
    if hasattr(processor, "_get_mm_hashes"):  # 0.33
        hashes = processor._get_mm_hashes(inputs)
    else:
        hashes = inputs.get_mm_hashes(processor.info.model_id, processor.info.ctx.get_mm_config().mm_hasher_algorithm)
    return processor._get_cache_missing_items(cache, items, hashes)[1], hf_kwargs
