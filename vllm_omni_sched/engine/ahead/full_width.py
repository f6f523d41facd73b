"""Encode in the step on all processors, those of idle lanes included.

vLLM binds the threads of a CPU worker and leaves a core to the scheduler and the front end. While a step encodes, these
wait for it, and lanes without jobs have no use for their cores either.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_omni_sched.lanes.processors import Processors, beside_the_llm
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))


class FullWidth:
    """Lends the worker threads on further processors, one each, for as long as an encode in the step lasts.

    The threads are started and bound once. The LLM's own threads stay where vLLM has bound them, so that its steps are
    what they were. Must be made in, and used by, the thread that runs the model.

    Args:
        processors: those of the worker's lanes, as `choose` gives them; empty on other devices.

    Attributes:
        threads: number of threads of an encode at full width; that of the LLM if there is nothing to lend.
    """

    def __init__(self, processors: Sequence[Processors]) -> None:
        self._own = self.threads = torch.get_num_threads()
        cpus = beside_the_llm(processors)
        if not cpus:
            return
        if _start_threads(self._own, cpus):
            self.threads = self._own + len(cpus)
            logger.info("Encode-ahead: an encode in the step also uses CPUs %s while the lane is idle", cpus)
        else:
            logger.warning(
                "Encode-ahead: an encode in the step uses the LLM's CPUs alone, because no thread could be started on "
                "CPUs %s through OpenMP",
                cpus,
            )

    @property
    def lends(self) -> bool:
        """Return whether there is anything to lend."""
        return self.threads > self._own

    @contextmanager
    def lent(self, *, lane_idle: bool = True) -> Iterator[None]:
        """Run the body at full width if the lanes have no jobs."""
        if not lane_idle or not self.lends:
            yield
            return
        _set_threads(self.threads)
        try:
            yield
        finally:
            _set_threads(self._own)


def _start_threads(own: int, cpus: Sequence[int]) -> bool:
    """Start a thread of torch's OpenMP for each of these processors, and bind it; return whether that was possible."""
    bound = set()

    def bind(number: int) -> None:
        if number >= own:
            os.sched_setaffinity(0, {cpus[number - own]})
            bound.add(number)

    return in_each_thread(bind, own + len(cpus)) and len(bound) == len(cpus)


def in_each_thread(function: Callable[[int], None], threads: int) -> bool:
    """Call a function with its number in each of so many threads of torch's OpenMP; return False if none was found."""
    runtime = _openmp()
    if runtime is None:
        return False

    def call(_: Any) -> None:
        function(runtime.omp_get_thread_num())

    runtime.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call), None, threads, 0)
    return True


def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch uses, by GNU's interface, which those of LLVM and Intel have, too."""
    loaded = Path("/proc/self/maps").read_text()
    for path in (None, *dict.fromkeys(re.findall(r"/\S*/torch[^/]*/lib/lib(?:gomp|omp|iomp)\S*", loaded))):
        library = ctypes.CDLL(path)
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


def _set_threads(number: int) -> None:
    torch._C.set_num_threads(number)  # vLLM has made torch.set_num_threads do nothing
