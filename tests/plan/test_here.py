"""The machine that this runs on, as the planner sees it."""

from __future__ import annotations

import os
import stat

import pytest

from rekindle.catalog.machines import THIS_CPU, gpu, machines
from rekindle.errors import RequestError
from rekindle.plan import fleet as module
from rekindle.plan.constants import CPU
from rekindle.plan.fleet import local_devices


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Plays NVIDIA's driver: a command of its name that says `text`."""

    def says(text, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ntest $# = 2 || exit 9\nprintf '{text}'\nexit {code}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        module.gpu_names.cache_clear()

    yield says
    module.gpu_names.cache_clear()


def test_ranks_share_the_cpu_where_there_is_no_gpu(driver):
    driver("No devices were found", code=6)
    one, count, link = local_devices(1)
    assert (one.name, count, link) == (CPU, 1, None)
    assert one.memory_bytes == machines()[THIS_CPU].memory_bytes
    assert 1e9 < one.tflops["fp32"] * 1e12 < 1e13, "a core's products"
    assert 1e8 < one.bandwidth_bytes_per_second < 1e12
    many, _, _ = local_devices(64)
    assert many.memory_bytes == one.memory_bytes // 64
    assert many.tflops["fp32"] < one.tflops["fp32"], "more ranks than cores take turns"


def test_gpus_are_known_by_the_name_that_the_driver_says(driver):
    driver("NVIDIA A100-SXM4-80GB\\n" * 4)
    found, count, speed = local_devices(2)
    assert (found, count) == (gpu("A100-80GB"), 4)
    assert speed == 300e9, "NVLink 3, one way"


@pytest.mark.parametrize(
    ("said", "ranks", "says"),
    [
        ("NVIDIA A100-SXM4-80GB\\n", 2, "2 ranks have 1 GPUs here"),
        ("NVIDIA GeForce 256\\n", 1, "does not know the GPU NVIDIA GeForce 256"),
    ],
)
def test_gpus_that_do_not_suffice_or_nobody_knows_are_refused(driver, said, ranks, says):
    driver(said)
    with pytest.raises(RequestError, match=says):
        local_devices(ranks)


@pytest.mark.parametrize("probe", ["import time; time.sleep(60)", "raise SystemExit(1)"])
def test_a_processor_that_cannot_be_measured_is_an_error_and_leaves_no_process(
    driver, monkeypatch, probe
):
    driver("No devices were found", code=6)
    monkeypatch.setattr(module, "_PROBE", probe)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 1)
    started = []
    start = module.subprocess.Popen
    monkeypatch.setattr(
        module.subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1]
    )
    module._cpu.cache_clear()
    with pytest.raises(RequestError, match="the speed of this processor could not be measured"):
        local_devices(2)
    assert started
    assert all(each.poll() is not None for each in started)
