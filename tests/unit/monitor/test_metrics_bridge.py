"""From a scheduler's counters to what /metrics serves: private files, one server's engines, nothing left."""

import json
import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm_omni_sched.engine.metrics.bridge import EngineMetricsCollector, MetricsPublisher
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


def test_files_are_private(base, publish):
    publish(SchedulerMetrics(), interval_seconds=3600.0)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [base, *base.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert len(modes) == 5  # base, its lock, the engine's directory and two files


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


def test_a_damaged_page_costs_a_warning_not_the_scrape(base, publish, caplog):
    publisher = publish(SchedulerMetrics(), interval_seconds=3600.0)
    publisher._directory.write(b"vllm:omni_sched_steps_total nonsense\n")
    assert scrape(base) == ""
    assert len(caplog.records) == 1
