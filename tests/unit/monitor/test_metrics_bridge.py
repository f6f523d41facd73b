"""From a scheduler's counters to what /metrics serves: private files, one server's engines, nothing left."""

import fcntl
import gc
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest, mmap_dict, multiprocess

from vllm_omni_sched.engine.metrics import bridge as metrics_bridge
from vllm_omni_sched.engine.metrics import files as metrics_files
from vllm_omni_sched.engine.metrics.bridge import EngineMetricsCollector, MetricsPublisher, engine_labels
from vllm_omni_sched.engine.metrics.files import EngineDirectory, live_pages
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.metrics import PREFIX


def config(index=0, **model):
    return SimpleNamespace(
        instance_id="1700000000/../x",
        parallel_config=SimpleNamespace(data_parallel_index=index),
        model_config=SimpleNamespace(**model),
    )


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    return tmp_path / "metrics"


@pytest.fixture
def publish(base):
    """Start publishers; all are closed in the end and must leave nothing behind."""
    started = []

    def start(metrics, vllm_config=None, **options):
        publisher = MetricsPublisher(metrics, vllm_config or config(), base=base, **options)
        publisher.start()
        started.append(publisher)
        return publisher

    yield start
    for publisher in started:
        publisher.close()
        publisher.close()
    assert not base.exists() or [path.name for path in base.iterdir()] == [".lock"]


def scrape(base) -> str:
    registry = CollectorRegistry()
    registry.register(EngineMetricsCollector(base))
    return generate_latest(registry).decode()


def test_counts_arrive_with_the_labels_of_vllm(base, publish):
    metrics = SchedulerMetrics(steps=7)
    publisher = publish(metrics, config(2, served_model_name=["tiny", "alias"], stage_id=1), interval_seconds=3600.0)
    metrics.steps += 1
    publisher.publish()
    assert f'{PREFIX}steps_total{{engine="2",model_name="tiny",stage="1"}} 8.0' in scrape(base)


def test_the_thread_publishes_at_each_tick_and_stops_when_told(base, publish):
    metrics = SchedulerMetrics()
    ticks = iter([False, False, True])
    seen = []

    def wait(seconds):
        seen.append(seconds)
        metrics.steps += 1
        return next(ticks)

    publisher = publish(metrics, interval_seconds=0.5, wait=wait)
    publisher._thread.join(timeout=30)
    assert seen == [0.5, 0.5, 0.5]
    assert 'steps_total{engine="0"} 2.0' in scrape(base)


def test_without_an_engine_of_ours_nothing_is_served(base):
    assert scrape(base) == ""
    base.mkdir(mode=0o700)
    assert scrape(base) == ""


def test_files_are_private(base, publish):
    publish(SchedulerMetrics(), interval_seconds=3600.0)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [base, *base.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert len(modes) == 5  # base, its lock, the engine's directory and two files


@pytest.mark.parametrize("umask", [0o777, 0o077, 0])
def test_modes_do_not_follow_the_umask(base, publish, umask):
    before = os.umask(umask)
    try:
        publish(SchedulerMetrics())
    finally:
        os.umask(before)
    found = [base, *base.rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in found}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_base_that_others_can_enter_is_refused_and_the_engine_goes_on(base, caplog):
    base.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only this user"):
        EngineDirectory.create("engine", {}, base)
    publisher = MetricsPublisher(SchedulerMetrics(), config(), base=base)
    publisher.start()
    publisher.publish()
    publisher.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list(base.iterdir()) == []
    assert scrape(base) == ""


def test_a_failing_write_is_logged_once_and_mended_by_the_next(base, publish, caplog):
    metrics = SchedulerMetrics()
    publisher = publish(metrics, interval_seconds=3600.0)
    directory = publisher._directory.path
    moved = directory.rename(base / "moved")
    publisher.publish()
    publisher.publish()
    assert len(caplog.records) == 1
    moved.rename(directory)
    metrics.steps = 4
    publisher.publish()
    assert 'steps_total{engine="0"} 4.0' in scrape(base)
    assert len(caplog.records) == 1


def test_a_publisher_that_is_closed_while_it_makes_a_page_fails_at_nothing(base, publish, caplog):
    """Close the bridge in the thread that records, as when garbage collection ends its scheduler there."""
    closing = False
    publisher = publish(SchedulerMetrics(), refresh=lambda: closing and publisher.close())
    closing = True
    publisher.publish()
    assert not caplog.messages
    assert [path.name for path in base.iterdir()] == [".lock"]


def test_schedulers_that_are_dropped_leave_nothing_and_complain_about_nothing(base, publish, caplog):
    """Many in one process, each dropped in the thread that publishes it."""

    class Owner:
        pass

    closed = []
    for _ in range(20):
        owner, in_thread, told = Owner(), threading.Event(), threading.Event()
        owner.itself = owner  # only garbage collection ends it

        def wait(seconds, told=told):
            told.wait(20)
            return False

        def refresh(in_thread=in_thread):
            if threading.current_thread() is not threading.main_thread():
                gc.collect()
                in_thread.set()

        publisher = publish(SchedulerMetrics(), wait=wait, refresh=refresh)
        weakref.finalize(owner, publisher.close)
        del owner
        told.set()
        assert in_thread.wait(20)
        closed.append(publisher)
    for publisher in closed:
        publisher.close()
    assert not caplog.messages


def test_a_forked_process_does_not_take_the_directory_along(base, publish):
    publisher = publish(SchedulerMetrics())
    child = os.fork()
    if child == 0:
        publisher._directory.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert scrape(base)


def test_what_a_dead_engine_core_left_is_neither_served_nor_kept(base):
    program = (
        "import os, sys, pathlib\n"
        "from vllm_omni_sched.engine.metrics.files import EngineDirectory\n"
        "directory = EngineDirectory.create('dead', {'engine': '0'}, pathlib.Path(sys.argv[1]))\n"
        "directory.write(b'vllm:omni_sched_steps_total 1\\n')\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(base)], check=True)
    assert len(list(base.glob("dead-*/metrics.prom"))) == 1
    assert list(live_pages(base)) == []
    alive = EngineDirectory.create("alive", {}, base)
    assert [path.name for path in base.iterdir() if path.is_dir()] == [alive.path.name]
    alive.close()


def _serve_until_told(base, connection):
    publisher = MetricsPublisher(SchedulerMetrics(steps=9), config(), base=base, interval_seconds=3600.0)
    publisher.start()
    connection.send("up")
    connection.recv()
    publisher.close()


def test_an_engine_core_in_a_child_process_belongs_to_us(base):
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_serve_until_told, args=(base, theirs))
    child.start()
    try:
        assert ours.recv() == "up"
        assert 'steps_total{engine="0"} 9.0' in scrape(base)
    finally:
        ours.send("stop")
        child.join(30)
    assert child.exitcode == 0
    assert scrape(base) == ""


def stranger(base, publish):
    """An engine core that another server's process has started."""
    publisher = publish(SchedulerMetrics(steps=1), interval_seconds=3600.0)
    identity = publisher._directory.path / "engine.json"
    known = json.loads(identity.read_text())
    identity.write_text(json.dumps({**known, "lineage": ["1@1"]}))
    return identity, known


def test_another_servers_engine_is_not_served(base, publish):
    stranger(base, publish)
    assert scrape(base) == ""


def test_api_servers_of_one_scrape_group_share_engines(base, publish, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/run/one")
    stranger(base, publish)
    assert "steps_total" in scrape(base)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/run/other")
    assert scrape(base) == ""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    assert scrape(base) == ""


def test_a_reused_pid_is_another_process(base, publish):
    identity, known = stranger(base, publish)
    identity.write_text(json.dumps({**known, "lineage": [f"{os.getpid()}@1"]}))
    assert scrape(base) == ""
    identity.write_text(json.dumps(known))
    assert "steps_total" in scrape(base)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"lineage": 3}'])
def test_a_damaged_identity_is_left_out(base, publish, content):
    identity, _ = stranger(base, publish)
    identity.write_text(content)
    assert scrape(base) == ""


def test_a_damaged_page_costs_a_warning_not_the_scrape(base, publish, caplog):
    publisher = publish(SchedulerMetrics(), interval_seconds=3600.0)
    publisher._directory.write(b"vllm:omni_sched_steps_total nonsense\n")
    assert scrape(base) == ""
    assert len(caplog.records) == 1


def test_the_lock_outlives_every_reader(base, publish):
    publisher = publish(SchedulerMetrics(), interval_seconds=3600.0)
    scrape(base)
    descriptor = os.open(publisher._directory.path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_labels_without_a_served_name_or_stage():
    assert engine_labels(config(served_model_name="m")) == {"engine": "0", "model_name": "m"}
    assert engine_labels(config()) == {"engine": "0"}


@pytest.fixture
def attached(base, monkeypatch):
    """`attach()` on a registry of the test's own, with one engine core to show; what it patches is undone."""
    served = CollectorRegistry()
    monkeypatch.setattr(metrics_bridge, "REGISTRY", served)
    monkeypatch.setattr(metrics_bridge, "_collector", EngineMetricsCollector(base))
    monkeypatch.setattr(multiprocess.MultiProcessCollector, "collect", multiprocess.MultiProcessCollector.collect)
    return served


def test_attach_adds_to_the_registry_of_a_single_server_once(attached, publish):
    stock = multiprocess.MultiProcessCollector.collect
    publish(SchedulerMetrics(steps=2), interval_seconds=3600.0)
    metrics_bridge.attach()
    metrics_bridge.attach()
    assert generate_latest(attached).decode().count('steps_total{engine="0"} 2.0') == 1
    assert multiprocess.MultiProcessCollector.collect is stock


def test_attach_adds_to_the_registries_that_several_servers_build_per_scrape(attached, publish, monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    other = mmap_dict.MmapedDict(str(tmp_path / "counter_1.db"))
    other.write_value(mmap_dict.mmap_key("other", "other_total", (), (), "Of another process."), 3.0, 0.0)
    other.close()
    publish(SchedulerMetrics(steps=2), interval_seconds=3600.0)
    metrics_bridge.attach()
    metrics_bridge.attach()
    for _ in range(2):
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        page = generate_latest(registry).decode()
        assert page.count('steps_total{engine="0"} 2.0') == 1
        assert "other_total 3.0" in page


def test_lineage_names_this_process_first_and_its_parent_next():
    chain = metrics_files.lineage()
    assert [int(token.partition("@")[0]) for token in chain[:2]] == [os.getpid(), os.getppid()]
    assert len(set(chain)) == len(chain)
