"""Requests against the service's own shapes: the excerpt is fresh, and every bound is looked at."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from rekindle.platforms.sagemaker.limits import limits
from rekindle.platforms.sagemaker.shapes import misfits
from tests.platforms.sagemaker.excerpt import FILE, excerpt

JOB: dict[str, Any] = {
    "ProcessingJobName": "a",
    "AppSpecification": {"ImageUri": "i", "ContainerEntrypoint": ["python3"]},
    "ProcessingResources": {
        "ClusterConfig": {"InstanceCount": 1, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 30}
    },
    "RoleArn": "arn:aws:iam::123456789012:role/me",
    "Environment": {"A": {"Get": "Parameters.a"}},
}


def found(path: str, value: Any) -> list[str]:
    """What is said of JOB with the value at the dotted path replaced."""
    job = copy.deepcopy(JOB)
    place: Any = job
    *parents, last = path.split(".")
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return [
        f"{p.where}: {p.what}"
        for p in misfits("CreateProcessingJobRequest", job, "job", frozenset())
    ]


def test_the_excerpt_is_what_botocore_says() -> None:
    committed = json.loads(FILE.read_text())
    fresh = excerpt()
    assert committed["botocore"] == fresh["botocore"], "make generate"
    assert committed == fresh, "make generate"


def test_a_job_that_fits_is_left_alone() -> None:
    assert found("RoleArn", JOB["RoleArn"]) == []


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "AppSpecification.ContainerArguments",
            ["x" * 257],
            "257 characters are more than the 256",
        ),
        ("AppSpecification.ContainerArguments", ["x"] * 101, "101 items are more than the 100"),
        ("AppSpecification.Colour", "red", "`Colour` is unknown"),
        ("AppSpecification", {}, "`ImageUri` is missing"),
        ("Environment.B", "x" * 257, "257 characters"),
        ("Environment.B", 3, "'3' is no string"),
        ("RoleArn", "me", "20"),
        ("RoleArn", "arn:aws:iam::123:role/me", "does not have the form"),
        ("ProcessingResources.ClusterConfig.InstanceType", "ml.m5.huge", "none that the service"),
        ("ProcessingResources.ClusterConfig.InstanceCount", 0, "less than the 1"),
        ("ProcessingResources.ClusterConfig.InstanceCount", True, "no integer"),
        ("ProcessingInputs", "x", "no list"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(path: str, value: Any, says: str) -> None:
    told = found(path, value)
    assert told
    assert any(says in line for line in told), told


def test_a_wrong_machine_names_the_nearest() -> None:
    job = copy.deepcopy(JOB)
    job["ProcessingResources"]["ClusterConfig"]["InstanceType"] = "ml.m5.xlage"
    (problem,) = misfits("CreateProcessingJobRequest", job, "job", frozenset())
    assert "ml.m5.xlarge" in problem.fix


@pytest.mark.parametrize(
    ("rows", "kind"),
    [("machines", "ProcessingInstanceType"), ("gpu_machines", "TrainingInstanceType")],
)
def test_every_machine_of_the_catalog_is_one_of_the_service(rows: str, kind: str) -> None:
    known = json.loads(FILE.read_text())["shapes"][kind]["enum"]
    assert set(limits()[rows]) <= set(known)
