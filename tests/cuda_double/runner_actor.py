"""vLLM's model runner V2 with our mixins on a device of the CUDA double: a program that does what tests ask.

It imports vLLM once and forks a process for each test (`tests/support/processes.py`), so that a planted fault, and what
the device says to it, ends with its test. Methods return what they have found; the tests judge it.
"""

from __future__ import annotations

from tests.cuda_double import with_vllm

with_vllm.install()

import os  # noqa: E402 - vLLM is found from here on
import threading  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor, wait  # noqa: E402
from contextlib import contextmanager, nullcontext  # noqa: E402
from random import Random  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache  # noqa: E402
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner  # noqa: E402
from vllm.v1.worker.gpu.mm.rope import RopeState  # noqa: E402

from tests.cuda_double import control, kernels, vllm_kernels  # noqa: E402
from tests.cuda_double.engine_v2 import CUDA, HIDDEN, DeviceEngine, Model  # noqa: E402
from tests.engine.harness.ahead_v2 import EMBEDS  # noqa: E402
from tests.engine.harness.gather import gathered, items_of, outputs_of, windows  # noqa: E402
from tests.engine.test_runner_v2 import drive  # noqa: E402
from tests.support.mrope import make_model, updates  # noqa: E402
from tests.support.mrope_session import QWEN2, Session  # noqa: E402
from tests.support.processes import serve  # noqa: E402
from vllm_omni_sched.config.options import OmniSchedConfig  # noqa: E402
from vllm_omni_sched.engine.ahead import host_store  # noqa: E402
from vllm_omni_sched.engine.ahead.host_store import HostStore  # noqa: E402
from vllm_omni_sched.engine.runners.extension import mix_in  # noqa: E402
from vllm_omni_sched.engine.runners.v2 import EncoderRunnerMixin, RopeStateMixin  # noqa: E402
from vllm_omni_sched.lanes import Job, cuda  # noqa: E402
from vllm_omni_sched.lanes.cuda import CudaDevice  # noqa: E402
from vllm_omni_sched.testing import make_item  # noqa: E402

LONG = 20.0
FAULT_SECONDS = 0.3
"""Time after which something that should have ended counts as waiting; only faults take it."""
KINDS = ("copies", "fills", "kernels", "waits", "records", "staged")


class Asked(dict[str, torch.Tensor]):
    """Encodings by hash; notes for which of them it is asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


class Synchronising(Asked):
    """Waits for the device whenever it is asked: a planted fault."""

    def get(self, name: str, default: Any = None) -> Any:
        torch.cuda.synchronize()
        return super().get(name, default)


class Copying(Asked):
    """Looks at the encodings on the host: a planted fault."""

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        return None if found is None else found.cpu()


CACHES = {"as it is": Asked, "synchronising": Synchronising, "copying": Copying}


class Unwaited(torch.cuda.Event):
    """An event for which the processor never waits."""

    def synchronize(self) -> None:
        pass


class RunnerActor:
    """Runs in a process of its own, with its device."""

    def __init__(self) -> None:
        with_vllm.show_devices()
        kernels.install()
        control.load_driver()
        vllm_kernels.install()
        torch.zeros(1, device=CUDA)
        torch.cuda.synchronize()
        self.runner_stream = torch.cuda.default_stream()

    # -- the gather alone ------------------------------------------------------

    def gather(self, arrangement: str, seed: int, cache: str) -> dict[str, Any]:
        """Gather many windows of two requests while the device stands still; compare all afterwards.

        Returns:
            ``ended``: whether the gathers ended while it stood; ``asked``: what they asked of it, by kind;
            ``wrong``: number of windows with other values than on the host; ``touched``: encodings that were looked
            up and have no embedding in a window.
        """
        rng = Random(seed)
        items = {name: items_of(arrangement, rng, name) for name in "ab"}
        on_host = {**outputs_of(items["a"]), **outputs_of(items["b"])}
        encodings = CACHES[cache]({name: rows.to(CUDA) for name, rows in on_host.items()})
        known = EncoderCache()
        known.encoder_outputs = encodings
        for name, features in items.items():
            known.add_request(name, features)
        runner = EncoderRunner(torch.nn.Module(), 1, 1, known, torch.float32, CUDA)
        mix_in(runner, EncoderRunnerMixin, OmniSchedConfig())
        steps = [{"a": a, "b": b} for a, b in zip(windows(rng, 40), windows(rng, 40), strict=True)]
        found = []

        def all_windows() -> None:
            for step in steps:
                encodings.names.clear()
                found.append((_gather(runner, step), set(encodings.names)))

        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as threads:
            with control.holding_all():
                torch.zeros(1, device=CUDA)  # who synchronises waits for it
                before = control.counts()
                gathering = threads.submit(all_windows)
                ended = bool(wait([gathering], LONG if cache == "as it is" else FAULT_SECONDS).done)
                after = control.counts()
            gathering.result(LONG)
        wrong = touched = 0
        for step, ((rows, mask), names) in zip(steps, found, strict=True):
            expected = [gathered(items[name], on_host, *window) for name, window in step.items()]
            embeddings = [row.tolist() for row in rows]
            wrong += (embeddings, mask.tolist()) != tuple(a + b for a, b in zip(*expected, strict=True))
            touched += len(names - _with_embeddings(items, on_host, step))
        return {
            "ended": ended,
            "asked": {
                kind: getattr(after, kind) - getattr(before, kind)
                for kind in KINDS
                if getattr(after, kind) != getattr(before, kind)
            },
            "wrong": wrong,
            "touched": touched,
        }

    # -- the whole way from the scheduler to the inputs of the language model --

    def any_order(self, seed: int, *, requests: int = 15, contents: int = 10, **config: Any) -> dict[str, Any]:
        """Let requests arrive at random until all have left; compare the inputs of every step."""
        rng, wrong, steps = Random(seed), 0, 0
        with DeviceEngine(num_blocks=rng.choice([40, 400]), **config) as engine:
            step = engine.step

            def checked() -> Any:
                nonlocal wrong, steps
                output = step()
                steps += 1
                wrong += len(engine.wrong())
                return output

            with mock.patch.object(engine, "step", checked):
                engine.run(rng, requests, values=range(contents))
            planner = engine.scheduler.omni.policies.planner
            return {
                "left": {name: len(reasons) for name, reasons in engine.left.items()},
                "wrong": wrong,
                "steps": steps,
                "loaded": len(engine.loaded),
                "in_step": len(engine.in_step),
                "restored": 0 if planner.host is None else planner.host.restored,
                "not_loaded": len(engine.worker._made),
                "on_device": all(rows.is_cuda for rows in engine.runner.encoder_cache.encoder_outputs.values()),
                "cached": set(engine.runner.encoder_cache.encoder_outputs)
                == set(engine.scheduler.encoder_cache_manager.cached),
            }

    def lane_before_runner(self, *, synchronizes: bool, follows: bool, num_sms: int | None = None) -> list[int]:
        """Pick an encoding up; return the steps with wrong inputs.

        Args:
            synchronizes: the lane reports an encoding when the device has made it; else at once.
            follows: the runner's stream waits for the lane's.
            num_sms: multiprocessors of the lane, as a green context.
        """
        engine = DeviceEngine(options=_lane_of(num_sms))
        with engine, _marks(wait=synchronizes), _follows(results=follows):
            _one_who_decodes(engine)
            engine.add("r", 20, [(4, 7)])
            if not synchronizes:
                control.hold(_lane_stream(engine))
            while not engine.loaded:
                engine.step()
                assert engine.worker.lane.drain(LONG)
            if not follows:
                self.runner_stream.synchronize()
            control.let_go(_lane_stream(engine))
            return engine.wrong()

    def runner_before_lane(self, *, follows: bool, num_sms: int | None = None) -> list[int]:
        """Change the weights of the encoder on the runner's stream, and encode; return the steps with wrong inputs."""
        with DeviceEngine(options=_lane_of(num_sms)) as engine, _follows(payloads=follows):
            _one_who_decodes(engine)
            control.hold(self.runner_stream)
            engine.runner.model.rows.add_(1.0)
            engine.reference.rows.add_(1.0)
            engine.add("r", 20, [(4, 7)])
            engine.step()
            if not follows:
                assert engine.worker.lane.drain(LONG)
            control.let_go(self.runner_stream)
            while not engine.loaded:
                engine.step()
                assert engine.worker.lane.drain(LONG)
            return engine.wrong()

    def memory_of_an_encoding(self, *, records: bool) -> dict[str, Any]:
        """Free an encoding that the runner's stream still has to read, while the lane goes on.

        Args:
            records: the encoding is marked as read by the runner's stream.

        Returns:
            ``held``, ``after``: the state of its memory while the runner's stream stands, and after that; ``again``:
            whether the lane's next encode got it; ``wrong``: steps with wrong inputs.
        """
        opened, begun = threading.Event(), threading.Event()
        addresses: list[int] = []

        def stop(layer: Any, arguments: Any) -> None:
            begun.set()
            assert opened.wait(LONG)

        def note(layer: Any, arguments: Any, output: torch.Tensor) -> None:
            addresses.append(output.data_ptr())

        found = cuda._tensors_in if records else lambda value: iter(())
        with DeviceEngine() as engine, mock.patch.object(cuda, "_tensors_in", found):
            runner, lane = engine.runner, engine.worker.lane
            _one_who_decodes(engine)
            engine.add("r", 20, [(4, 7)])
            engine.step()
            assert lane.drain(LONG)
            runner.model.layers[0].register_forward_pre_hook(stop)
            for layer in runner.model.layers:
                layer.register_forward_hook(note)

            def begin_next() -> None:
                if engine.loaded:
                    item = make_item(0, EMBEDS, "item-8", data=8)
                    assert lane.submit(Job("next", (item.modality, item.data)))
                    assert begun.wait(LONG)
                    self.runner_stream.synchronize()  # the lane's stream follows what is launched up to here
                    control.hold(self.runner_stream)

            engine.before_gather = begin_next
            while not engine.loaded:
                engine.step()
            address = runner.encoder_cache.encoder_outputs["item-7"].data_ptr()
            frees = SchedulerOutput.make_empty()
            frees.free_encoder_mm_hashes.append("item-7")
            runner.free_states(frees)
            held = _state_of(address)
            opened.set()
            assert lane.drain(LONG)
            again = address in addresses
            control.let_go(self.runner_stream)
            torch.cuda.synchronize()
            wrong = engine.wrong()
            with torch.cuda.stream(_lane_stream(engine)):
                torch.empty(1, device=CUDA)  # torch looks for memory whose events have passed
            return {"held": held, "again": again, "after": _state_of(address), "wrong": wrong}

    def host_tier(self, fault: str) -> dict[str, Any]:
        """Let encodings go to host memory and come back.

        Args:
            fault: ``keep`` or ``restore`` runs on a stream of its own, for which nobody waits; none of them if empty.

        Returns:
            ``wrong``: steps with wrong inputs; ``restored``: encodings that came back; ``staged``: copies from memory
            that is not pinned.
        """
        side = torch.cuda.Stream()

        def beside(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def called(*args: Any) -> torch.Tensor:
                with torch.cuda.stream(side):
                    return function(*args)

            return called

        keep, restore = host_store.to_host, HostStore._timed_copy
        with (
            DeviceEngine(encoder_cache_size=16, options={"encoder_cache_host_bytes": 1 << 22}) as engine,
            mock.patch.object(host_store, "to_host", beside(keep) if fault == "keep" else keep),
            mock.patch.object(HostStore, "_timed_copy", beside(restore) if fault == "restore" else restore),
        ):
            _one_who_decodes(engine)
            self._run(engine, "first", 0)
            engine.wrong()
            staged = control.counts().staged
            control.hold(side)
            for number in range(1, 17):
                self._run(engine, str(number), number % 4)
            staged = control.counts().staged - staged
            control.let_go(side)
            restored = engine.scheduler.omni.policies.planner.host.restored
            return {"wrong": engine.wrong(), "restored": restored, "staged": staged}

    def _run(self, engine: DeviceEngine, name: str, value: int) -> None:
        """Run a request with one item until it has left, and the runner's stream has run dry."""
        engine.add(name, 20, [(4, value)], max_tokens=1)
        while name not in engine.left:
            engine.step()
            self.runner_stream.synchronize()

    def in_stale_memory(self, others: int, *, all_tokens: bool = False) -> dict[str, Any]:
        """Gather and merge the middle item of a prompt; the encodings of all others lie in memory that was freed.

        Args:
            others: their number before the item, and behind it.
            all_tokens: the window has them as well: a planted fault.

        Returns:
            ``launches``: number of kernels and copies; ``right``: whether the inputs are; ``error``: of the device.
        """
        length, items = 4, 2 * others + 1
        features = [make_item(length * i, length, f"item-{i}") for i in range(items)]
        model = Model().to(CUDA)
        stale = _stale(length)
        encodings = {feature.identifier: stale for feature in features}
        encodings[f"item-{others}"] = torch.full((length, HIDDEN), 7.0, device=CUDA)
        known = EncoderCache()
        known.encoder_outputs = encodings
        known.add_request("a", features)
        runner: Any = EncoderRunner(model, items * length, HIDDEN, known, torch.float32, CUDA)
        mix_in(runner, EncoderRunnerMixin, OmniSchedConfig())
        window = (0, items * length) if all_tokens else (others * length, (others + 1) * length)
        ids = torch.zeros(window[1] - window[0], dtype=torch.int64, device=CUDA)
        torch.cuda.synchronize()
        before = control.counts()
        with control.holding_all():  # vLLM gives the error of a device another name if a launch finds it
            inputs = runner.get_inputs_embeds(ids, *_gather(runner, {"a": window}))[: len(ids)]
        after = control.counts()
        try:
            right, error = bool((inputs.cpu() == 7.0).all()), ""
        except RuntimeError as failure:
            right, error = False, str(failure)
        return {
            "launches": after.kernels - before.kernels + after.copies - before.copies,
            "right": right,
            "error": error,
        }

    # -- sessions ----------------------------------------------------------------

    def sessions(self, seed: int, num_blocks: int) -> dict[str, Any]:
        """Return what stock and ours know of sessions after each step, in the memory of the device."""
        stock, _ = drive(seed, ours=False, num_blocks=num_blocks, device=CUDA)
        known, sent = drive(seed, ours=True, num_blocks=num_blocks, device=CUDA)
        different = [step for step, (one, other) in enumerate(zip(stock, known, strict=True)) if one != other]
        return {"different": different, "steps": len(known), "deltas": sent["SessionDelta"]}

    def rows_of_positions(self, seed: int) -> dict[str, Any]:
        """Let sessions grow in rows of M-RoPE positions, which the device reads; return how many were wrong."""
        model, rng = make_model(QWEN2), Random(seed)
        state: Any = RopeState(3, 2, 64, 4000, CUDA)
        mix_in(state, RopeStateMixin, OmniSchedConfig())
        sessions = [Session("a"), Session("b")]
        wrong = updated = 0
        for pieces in updates(rng, QWEN2, 30):
            slot = rng.randrange(2)
            session = sessions[slot]
            if rng.random() < 0.1:
                session.restart()
            session.add(pieces)
            tokens = session.mirror.tokens
            state.init_prefill_positions(slot, model, tokens, list(session.mirror.features))
            state.apply_staged_writes()
            positions, delta = session.expected(model)
            written = state.read_prefill_positions(slot, len(tokens))
            assert written.is_cuda
            wrong += (
                not torch.equal(written.cpu(), positions.to(torch.int32)) or int(state.prefill_delta.gpu[slot]) != delta
            )
            updated += 1
        return {"wrong": wrong, "updated": updated}


def _gather(runner: EncoderRunner, step: dict[str, tuple[int, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gather for requests at these windows, all of them in their prompts."""
    starts = np.array([start for start, _ in step.values()])
    counts = np.array([end - start for start, end in step.values()])
    ends = np.full(len(step), 10_000)
    return runner.gather_mm_embeddings(
        list(step), int(counts.sum()), counts, np.concatenate([[0], np.cumsum(counts)]), ends, starts
    )


def _with_embeddings(items: dict[str, list[Any]], on_host: dict[str, torch.Tensor], step: Any) -> set[str]:
    """Return the items that have an embedding in their request's window."""
    return {
        item.identifier
        for name, window in step.items()
        for item in items[name]
        if gathered([item], on_host, *window)[0]
    }


def _one_who_decodes(engine: DeviceEngine) -> None:
    """Add a request that decodes, beside which items are encoded in the lane."""
    engine.add("text", 4, max_tokens=10_000)
    engine.step()
    assert engine.wrong() == []


def _lane_of(num_sms: int | None) -> dict[str, Any]:
    """Return options for a lane with so many multiprocessors; None for all."""
    return {} if num_sms is None else {"expert": {"encode_lane_sms": num_sms}}


def _lane_stream(engine: DeviceEngine) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = engine.worker.lane._device._stream
    return stream


def _state_of(address: int) -> str:
    """Return what torch's allocator says of the memory at an address."""
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        for block in segment["blocks"]:
            if at <= address < at + block["size"]:
                return str(block["state"])
            at += block["size"]
    return "not there"


def _stale(rows: int) -> torch.Tensor:
    """Return a tensor whose memory has been given back to the device."""
    big = torch.zeros(16 << 20, device=CUDA)
    view = {"shape": (rows, HIDDEN), "typestr": "<f4", "data": (big.data_ptr(), False), "version": 2}
    found = torch.as_tensor(type("Stale", (), {"__cuda_array_interface__": view})(), device=CUDA)
    del big
    torch.cuda.empty_cache()
    return found


@contextmanager
def _marks(*, wait: bool) -> Iterator[None]:
    """Let nobody wait for a mark on the host, unless ``wait``."""

    def mark(device: CudaDevice) -> torch.cuda.Event:
        event = Unwaited()
        event.record(torch.cuda.current_stream(CUDA))
        return event

    with nullcontext() if wait else mock.patch.object(CudaDevice, "mark", mark):
        yield


@contextmanager
def _follows(*, payloads: bool = True, results: bool = True) -> Iterator[None]:
    """Let the lane wait for its payloads, and the runner's stream for results; without that, faults are planted."""
    real = CudaDevice.follow

    def follow(device: CudaDevice, mark: Any, tensors: Any) -> None:
        if payloads if tensors == () else results:
            real(device, mark, tensors)

    with mock.patch.object(CudaDevice, "follow", follow):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(RunnerActor)
    os._exit(0)  # to take vLLM's modules apart would take seconds
