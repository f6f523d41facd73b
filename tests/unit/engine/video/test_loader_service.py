"""One service for all videos of a process, by the operator's choice."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.engine.video import service
from vllm_omni_sched.video import service as service_module
from vllm_omni_sched.video.options import VideoOptions


@pytest.fixture
def made(monkeypatch) -> Iterator[list[mock.Mock]]:
    """The services that were made; none of them starts a process."""
    services: list[mock.Mock] = []

    def make(options: VideoOptions, observer: object, **place: object) -> mock.Mock:
        services.append(mock.Mock(options=options))
        return services[-1]

    monkeypatch.setattr(service_module, "FlashCodec", make)
    monkeypatch.setattr(service, "_metrics_of_process", mock.Mock())
    service.configure(VideoOptions())
    yield services
    service.configure(VideoOptions())


def test_one_is_made_and_started_for_all_threads(made):
    got = []
    threads = [threading.Thread(target=lambda: got.append(service.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert all(service is made[0] for service in got)
    made[0].start.assert_called_once_with()


def test_other_options_make_another_and_end_the_first(made):
    first = service.get()
    service.configure(VideoOptions(decoders=3))
    assert first.close.call_count == 1
    assert service.get() is not first
    assert made[1].options.decoders == 3


def test_where_nobody_chose_it_no_request_may(made):
    service.refuse()
    with pytest.raises(RequestError, match="but this server was not started with it: leave it out, or"):
        service.get()
    assert made == []


def test_an_engine_that_did_not_choose_it_takes_it_from_none_that_did(made):
    service.get()
    service.refuse()
    assert service.get() is made[0]


def test_a_forked_child_makes_its_own(made):
    service.get()
    child = os.fork()
    if not child:
        os._exit(0 if service.get() is not made[0] and len(made) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert made[0].close.call_count == 0
