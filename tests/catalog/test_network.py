"""What NCCL is told on a machine: rows with their sources."""

import re
from pathlib import Path

import pytest
import yaml

from rekindle.catalog import tables as module
from rekindle.catalog.tables import network
from rekindle.launch.torchrun import PROFILE
from rekindle.platforms.azureml.limits import limits

ROWS = yaml.safe_load(Path(module.__file__).with_name("network.yaml").read_text())
AZURE = {
    "NCCL_IB_PCI_RELAXED_ORDERING": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_SOCKET_IFNAME": "eth0",
}
MACHINES = {
    "ml.p5.48xlarge": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_PROTO": "simple"},
    "ml.g5.48xlarge": {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple"},
    "ml.g5.xlarge": {},
    "p4d.24xlarge": {"FI_EFA_USE_HUGE_PAGE": "0"},
    "g5.48xlarge": {"FI_EFA_USE_HUGE_PAGE": "0"},
    "g5.xlarge": {},
    "Standard_ND96asr_v4": AZURE,
    "Standard_ND96amsr_A100_v4": AZURE,
    "Standard_ND96isr_H100_v5": AZURE,
    "Standard_ND96isr_H200_v5": AZURE,
    "Standard_NC24ads_A100_v4": {},
    "a3-highgpu-8g": {},
    "a3-megagpu-8g": {
        PROFILE: "/usr/local/nvidia/lib64/nccl-env-profile.sh:/dev/aperture_devices",
        "NCCL_LIB_DIR": "/usr/local/nvidia/lib64",
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
    },
    "a3-ultragpu-8g": {PROFILE: "/usr/local/gib/scripts/set_nccl_env.sh"},
    "a4-highgpu-8g": {PROFILE: "/usr/local/gib/scripts/set_nccl_env.sh"},
    "": {},
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_network_of_a_machine_is_known_by_its_name(machine: str) -> None:
    assert network(machine) == MACHINES[machine]


def test_every_row_has_a_source_and_a_day_and_no_machine_has_two() -> None:
    for row in ROWS:
        assert set(row) - {"needs"} == {"machines", "environment", "source", "as_of"}
        assert all(isinstance(value, str) for value in row["environment"].values()), row
    for machine in MACHINES:
        assert sum(bool(re.fullmatch(row["machines"], machine)) for row in ROWS) <= 1, machine


def test_machines_with_infiniband_in_azures_catalog_are_told_so() -> None:
    infiniband = [name for name in limits()["gpu_machines"] if "ND96" in name]
    assert len(infiniband) == 4
    assert all(network(name) == AZURE for name in infiniband)
