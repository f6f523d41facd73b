"""The digest of the weights with which the workers of an engine encode."""

import secrets
from collections.abc import Iterator
from typing import Any

import torch
from blake3 import blake3

from vllm_omni_sched import compat
from vllm_omni_sched.engine.contents import parts
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


def digest_of_encoder(model: Any) -> str:
    """Return the digest of the weights of a model outside its language model, those of all ranks together.

    Where they cannot be read, as on CPUs, where vLLM packs them into objects of oneDNN, a name is returned that no
    other engine has. All of them are read, so that a large encoder takes a while. Every rank must call this at once.
    """
    told: list[Any] = [(_own_digest(model), secrets.token_hex(16))]
    group = compat.tensor_parallel_group()
    if group.world_size > 1:
        own, told = told[0], [None] * group.world_size
        torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    if all(digest is not None for digest, _ in told):
        return blake3(" ".join(digest for digest, _ in told).encode()).hexdigest()
    logger.warning(
        "the weights may have changed, and vLLM has packed those of the encoder so that they cannot be compared with "
        "those of other engines: from now on this engine shares encodings with no other one, until it is restarted"
    )
    name: str = told[0][1]
    return name


def _own_digest(model: Any) -> str | None:
    hasher = blake3()
    for name, tensor in _weights(model):
        if not tensor.numel():
            return None
        for part in parts([name, tensor.detach().cpu()]):
            hasher.update(part)
    return str(hasher.hexdigest())


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else None
    decodes = set() if language_model is None else {id(module) for module in language_model.modules()}
    for path, module in model.named_modules():
        if id(module) in decodes:
            continue
        yield from module.named_parameters(path, recurse=False)
        yield from module.named_buffers(path, recurse=False)
