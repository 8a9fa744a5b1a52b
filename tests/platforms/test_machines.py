"""What a step asks of a machine, and which one has it."""

import dataclasses

import pytest
from kfp import dsl

from rekindle.errors import UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.distribution import Distribution
from rekindle.ir.graph import Resources
from rekindle.ir.read.pipeline import read
from rekindle.platforms.azureml import limits as azureml
from rekindle.platforms.machines import amount, gpu_kind, machine_for, those_there
from rekindle.platforms.sagemaker import limits as sagemaker


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def hello():
    print("hello")


@dsl.pipeline(name="one")
def one():
    hello()


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        ("4", 4.0),
        ("500m", 0.5),
        ("1.5", 1.5),
        ("4Gi", 4 * 2.0**30),
        ("16G", 16e9),
        ("256Mi", 2.0**28),
        (".5", 0.5),
        ("1Ei", 2.0**60),
        ("2E", 2e18),
        ("1e3", 1e3),
    ],
)
def test_quantities(quantity: str, value: float) -> None:
    assert amount(quantity) == value


@pytest.mark.parametrize(
    ("asked", "gpu", "gpus", "machine"),
    [
        (Resources(), "", 0, "usual"),
        (Resources(cpu_limit="2", memory_limit="8Gi"), "", 0, "ml.m5.large"),
        (Resources(cpu_limit="1", memory_limit="32G"), "", 0, "ml.m5.2xlarge"),
        (Resources(cpu_limit="97"), "", 0, None),
        (Resources(), "", 1, "ml.g4dn.xlarge"),
        (Resources(), "L4", 1, "ml.g6.xlarge"),
        (Resources(memory_limit="100Gi"), "L4", 1, "ml.g6.8xlarge"),
        (Resources(), "H100", 2, "ml.p5.48xlarge"),
        (Resources(), "A100-80GB", 8, "ml.p4de.24xlarge"),
        (Resources(), "TPU", 1, None),
        (Resources(), "", 16, None),
    ],
)
def test_the_smallest_machine_that_has_it(
    asked: Resources, gpu: str, gpus: int, machine: str | None
) -> None:
    (step,) = read(compile_function(one)).steps()
    spread = Distribution(nodes=1, gpus_per_node=gpus, accelerator=gpu)
    container = dataclasses.replace(step.container, resources=asked)
    step = dataclasses.replace(step, container=container, distribution=spread)
    if machine is not None:
        assert machine_for("sagemaker", sagemaker.limits(), step, "usual") == machine
        return
    with pytest.raises(UnsupportedError, match="no machine has"):
        machine_for("sagemaker", sagemaker.limits(), step, "usual")


def test_no_quantity() -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        amount("lots")


@pytest.mark.parametrize(
    ("accelerator", "kind"),
    [
        ("NVIDIA_TESLA_T4", "T4"),
        ("nvidia-tesla-t4", "T4"),
        ("NVIDIA_A100_80GB", "A100-80GB"),
        ("NVIDIA_TESLA_A100", "A100"),
        ("NVIDIA_H100_MEGA_80GB", "H100"),
        ("nvidia.com/gpu", ""),
        ("H200", "H200"),
        ("amd.com/gpu", "AMD"),
        ("NVIDIA_H200_141GB", "H200"),
    ],
)
def test_a_gpu_has_one_name(accelerator: str, kind: str) -> None:
    assert gpu_kind(accelerator) == kind


def test_what_is_no_quantity_is_refused_with_its_place() -> None:
    (step,) = read(compile_function(one)).steps()
    asked = dataclasses.replace(step.container, resources=Resources(cpu_limit="four"))
    step = dataclasses.replace(step, container=asked)
    with pytest.raises(UnsupportedError, match="'four' is not a quantity") as caught:
        machine_for("sagemaker", sagemaker.limits(), step, "ml.m5.xlarge")
    assert caught.value.problems[0].where == "root.dag.tasks.hello"


def test_a_gpu_that_a_platform_has_not_is_refused_with_those_it_has() -> None:
    (step,) = read(compile_function(one)).steps()
    step = dataclasses.replace(step, distribution=Distribution(1, 1, accelerator="L4"))
    with pytest.raises(UnsupportedError) as caught:
        machine_for("azureml", azureml.limits(), step, "")
    assert (
        "no machine has the 1 GPUs L4 that it asks for; there are A10 (up to 1), A100 (up to 8), "
        "A100-80GB (up to 8), H100 (up to 8), H200 (up to 8), T4 (up to 4)"
    ) in caught.value.problems[0].what


def test_of_the_machines_with_a_gpu_the_most_that_one_has_is_said() -> None:
    assert those_there({"b": ["T4", 4, 8, 8], "a": ["T4", 1, 4, 4]}) == "T4 (up to 4)"
