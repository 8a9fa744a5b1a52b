"""GPUs and machines: every row says where it is from, and what can be read a second time is."""

from __future__ import annotations

import datetime
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rekindle.catalog import machines as machines_of
from rekindle.catalog.machines import Machine, gpu, gpus, machine, machines, peak_flops
from rekindle.errors import RequestError
from rekindle.platforms.azureml import limits as azureml
from rekindle.platforms.machines import with_gpus
from rekindle.platforms.sagemaker import limits as sagemaker
from rekindle.platforms.vertex import limits as vertex
from rekindle.tables import rows


@pytest.mark.parametrize("name", [*gpus(), *machines()])
def test_every_row_has_a_source_and_a_day(name: str) -> None:
    row = gpus().get(name) or machines()[name]
    assert len(row.source) > 10 or name == "this-cpu"
    assert datetime.date(2026, 11, 20) <= row.as_of <= datetime.date.today()


@pytest.mark.parametrize("name", machines())
def test_a_machine_has_gpus_that_there_are_and_links_where_there_is_something_to_link(
    name: str,
) -> None:
    has = machine(name)
    assert (has.gpu is None) == (has.gpus == 0)
    assert has.gpu is None or has.gpu in gpus()
    assert (has.inside_bytes_per_second is None) == (has.gpus < 2)
    for speed in (has.inside_bytes_per_second, has.between_bytes_per_second):
        assert speed is None or speed > 5e7
    assert has.vcpus or has.cloud == "local"


NOMINAL_GIB = {
    "B200": 180,
    "H200": 141,
    "H100": 80,
    "H100-PCIE": 80,
    "H100-NVL": 94,
    "A100-80GB": 80,
    "A100-80GB-PCIE": 80,
    "A100": 40,
    "L40S": 48,
    "L4": 24,
    "A10G": 24,
    "A10": 24,
    "T4": 16,
    "V100": 16,
    "RTX-5090": 32,
    "RTX-4090": 24,
    "RTX-3090": 24,
    "RTX-A6000": 48,
}


def test_a_gpu_shows_a_little_less_memory_than_its_data_sheet() -> None:
    assert set(NOMINAL_GIB) == set(gpus())
    for name, gib in NOMINAL_GIB.items():
        assert 0.93 * gib < gpu(name).memory_bytes / 2**30 <= gib, name
        assert 2e11 < gpu(name).bandwidth_bytes_per_second < 1e13


@pytest.mark.parametrize("name", gpus())
def test_a_gpus_peaks_double_with_half_the_bits(name: str) -> None:
    tflops = gpu(name).tflops
    assert set(tflops) <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert tflops.get("bf16", tflops["fp16"]) == tflops["fp16"]
    for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8")):
        if wide in tflops and narrow in tflops:
            assert tflops[narrow] / tflops[wide] == pytest.approx(2, rel=0.03)


DEVICES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIE",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIE",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10G": "A10G",
    "NVIDIA A10": "A10",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA RTX A6000": "RTX-A6000",
}


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_is_known_by_its_whole_name(device: str) -> None:
    assert peak_flops(device, "fp16") == gpu(DEVICES[device]).tflops["fp16"] * 1e12


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA T400",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A1000",
        "",
    ],
)
def test_a_device_that_is_called_nearly_so_is_not_known(device: str) -> None:
    assert peak_flops(device, "fp16") is None


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("ml.p5.48xlarge", "p5.48xlarge"),
        ("p5.48xlarge", "p5.48xlarge"),
        ("Standard_ND96isr_H100_v5", "Standard_ND96isr_H100_v5"),
        ("a3-highgpu-8g", "a3-highgpu-8g"),
    ],
)
def test_a_machine_goes_by_the_names_of_its_platforms(name: str, plain: str) -> None:
    assert machine(name).name == plain


@pytest.mark.parametrize(
    ("look", "name", "near"),
    [
        (machine, "ml.p5.48xlage", "such as p5.48xlarge"),
        (machine, "standard_nd96isr_h100_v5", "such as Standard_ND96isr_H100_v5"),
        (gpu, "h100", "such as H100"),
        (gpu, "MI300X", "it has B200, H200"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_the_nearest(
    look: Any, name: str, near: str
) -> None:
    with pytest.raises(RequestError, match=f"`{name}`") as caught:
        look(name)
    assert near in caught.value.problems[0].fix


def test_this_cpu_is_what_the_operating_system_says() -> None:
    here = machine("this-cpu")
    assert (here.vcpus, here.gpus, here.cloud) == (os.cpu_count(), 0, "local")
    assert here.memory_bytes
    assert here.memory_bytes > 2**30


# Typed in a second time, from: EC2's page of P5 and its DescribeInstanceTypes; the tables of Google's
# gpu-network-bandwidth and of accelerator-optimized machines (26 CPUs and 234 GiB a GPU); Microsoft's
# ndh100v5-series.md and ncadsh100v5-series.md. GPU, how many, CPUs, GiB, GB/s from a GPU to another,
# network, Gbit/s of the machine, interfaces.
H100: dict[str, tuple[Any, ...]] = {
    "p5.4xlarge": ("H100", 1, 16, 256, None, "EFA", 100, 1),
    "p5.48xlarge": ("H100", 8, 192, 2048, 450, "EFA", 3200, 32),
    "a3-highgpu-1g": ("H100", 1, 26, 234, None, "Ethernet", None, 1),
    "a3-highgpu-2g": ("H100", 2, 52, 468, 450, "Ethernet", None, 1),
    "a3-highgpu-4g": ("H100", 4, 104, 936, 450, "Ethernet", None, 1),
    "a3-highgpu-8g": ("H100", 8, 208, 1872, 450, "GPUDirect-TCPX", 800, 4),
    "a3-megagpu-8g": ("H100", 8, 208, 1872, 450, "GPUDirect-TCPXO", 1600, 8),
    "Standard_NC40ads_H100_v5": ("H100-NVL", 1, 40, 320, None, "Ethernet", 40, 2),
    "Standard_NC80adis_H100_v5": ("H100-NVL", 2, 80, 640, 63, "Ethernet", 80, 4),
    "Standard_ND96isr_H100_v5": ("H100", 8, 96, 1900, 450, "InfiniBand", 3200, 8),
}


def test_the_machines_with_an_h100_are_those_of_a_second_reading() -> None:
    assert {
        each.name: _typed(each) for each in machines().values() if "H100" in (each.gpu or "")
    } == H100


# what carries data between machines, and over how many interfaces: for readers of the YAML
NETWORKS = {
    name: (size[3], size[5])
    for family in rows(Path(machines_of.__file__).with_suffix(".yaml"))
    for name, size in family["sizes"].items()
}


def _typed(has: Machine) -> tuple[Any, ...]:
    assert has.memory_bytes
    inside, between = has.inside_bytes_per_second, has.between_bytes_per_second
    technology, nics = NETWORKS[has.name]
    return (
        has.gpu,
        has.gpus,
        has.vcpus,
        has.memory_bytes / 2**30,
        inside and inside / 1e9,
        technology,
        between and between * 8 / 1e9,
        nics,
    )


def test_amazons_machines_are_what_ec2_says_of_them() -> None:
    moto = pytest.importorskip("moto", reason="moto is a developer's dependency")
    path = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    told = json.loads(gzip.decompress(path.read_bytes()))
    compared = 0
    for each in machines().values():
        if each.cloud != "aws" or each.name not in told:
            continue
        says, compared = told[each.name], compared + 1
        (has,) = says.get("GpuInfo", {}).get("Gpus", [{"Name": None, "Count": 0}])
        assert ((each.gpu or "None").partition("-")[0], each.gpus) == (
            str(has["Name"]),
            has["Count"],
        )
        assert each.vcpus == says["VCpuInfo"]["DefaultVCpus"]
        assert each.memory_bytes == says["MemoryInfo"]["SizeInMiB"] * 2**20
        network = says["NetworkInfo"]
        assert each.between_bytes_per_second == _gbit(network) * 1e9 / 8, each.name
        interfaces = network.get("EfaInfo", {}).get("MaximumEfaInterfaces")
        technology, nics = NETWORKS[each.name]
        assert (nics if technology == "EFA" else None) == interfaces
    assert compared > 40


def _gbit(network: dict[str, Any]) -> float:
    """Of a card the baseline; of several what they have together, which is no sum of theirs."""
    cards = network["NetworkCards"]
    if len(cards) == 1:
        return float(cards[0]["BaselineBandwidthInGbps"])
    times, _, words = network["NetworkPerformance"].rpartition("x ")
    return float(words.split()[0]) * int(times or 1)


@pytest.mark.parametrize("platform", [sagemaker, azureml, vertex], ids=lambda m: m.__name__)
def test_what_a_platform_offers_is_in_the_catalog(platform: Any) -> None:
    there = platform.limits()
    there = there.get("custom_job", there)
    for name in there.get("cpu_machines") or there["machines"]:
        assert machine(name).gpus == 0
        assert machine(name).vcpus
    for name, (_, _, cpus, gib) in with_gpus(there.get("gpu_machines", [])).items():
        assert cpus, name
        assert gib, name
    assert set(with_gpus(there.get("gpu_machines", []))) == set(there.get("gpu_machines", []))


def test_vertex_rows_name_gpus_as_the_catalog_does() -> None:
    for name, kind, _, count in vertex.limits()["custom_job"]["machines"]:
        has = machine(name)
        if not name.startswith("n1-"):  # those get any GPUs
            assert (kind.removesuffix("-MEGA"), count) == (has.gpu, has.gpus)


def test_a_link_is_told_in_bytes_a_second() -> None:
    assert machine("p5.48xlarge").between_bytes_per_second == 400e9
    assert machine("Standard_ND96asr_v4").inside_bytes_per_second == 300e9
