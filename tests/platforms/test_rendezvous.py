"""Each platform's environment becomes the same Rendezvous: nodes counted once, rank 0 where all
meet, and a process's rank never taken for a node's."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import RequestError
from rekindle.launch.rendezvous import VARIABLE, Rendezvous
from rekindle.platforms.kubeflow import node as kubeflow
from rekindle.platforms.vertex import node as vertex


def _entry(platform: str) -> ModuleType:
    """An entry puts the folder of its bundle first in sys.path; here that would hide other modules from all tests behind."""
    before = [*sys.path]
    try:
        return importlib.import_module(f"rekindle.platforms.{platform}.entry")
    finally:
        sys.path[:] = before


azureml, sagemaker = _entry("azureml"), _entry("sagemaker")
groups = st.integers(2, 300).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.integers(0, nodes - 1), st.integers(0, 16))
)


@given(groups)
def test_kubeflow(group: tuple[int, int, int]) -> None:
    nodes, rank, gpus = group
    env = {
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": "ft-node-0-0.ft",
        "PET_MASTER_PORT": "29500",
    }
    assert kubeflow.rendezvous(env, gpus) == Rendezvous(
        nodes, rank, max(1, gpus), "ft-node-0-0.ft", 29500
    )
    assert kubeflow.rendezvous({**env, "PET_NPROC_PER_NODE": "3"}, gpus).ranks_per_node == 3


@given(groups, st.data())
def test_vertex(group: tuple[int, int, int], data: st.DataObject) -> None:
    nodes, rank, gpus = group
    second = data.draw(st.integers(1, nodes - 1))
    names = [f"host-{i}:2222" for i in range(nodes)]
    pools = {"workerpool0": names[:1], "workerpool1": names[1 : second + 1]}
    if second + 1 < nodes:
        pools["workerpool2"] = names[second + 1 :]
    kind, index = next(
        (kind, hosts.index(names[rank])) for kind, hosts in pools.items() if names[rank] in hosts
    )
    spec = {"cluster": pools, "task": {"type": kind, "index": index}, "environment": "cloud"}
    assert vertex.rendezvous({"CLUSTER_SPEC": json.dumps(spec)}, gpus) == Rendezvous(
        nodes, rank, max(1, gpus), "host-0", 2222
    )


@given(groups, st.randoms())
def test_sagemaker(group: tuple[int, int, int], random: object) -> None:
    nodes, rank, gpus = group
    hosts = [f"algo-{i + 1}" for i in range(nodes)]
    shuffled = list(hosts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"hosts": shuffled, "current_host": hosts[rank]}, file)
        file.flush()
        assert sagemaker.rendezvous(gpus, Path(file.name)) == Rendezvous(
            nodes, rank, max(1, gpus), "algo-1", sagemaker.PORT
        )


@given(groups)
def test_azureml(group: tuple[int, int, int]) -> None:
    nodes, rank, gpus = group
    env = {
        "AZUREML_NODE_COUNT": str(nodes),
        "NODE_RANK": str(rank),
        "WORLD_SIZE": str(nodes),
        "RANK": str(rank),
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "6105",
    }
    wanted = Rendezvous(nodes, rank, max(1, gpus), "10.0.0.4", 6105)
    assert azureml.rendezvous(env, gpus) == wanted
    assert azureml.rendezvous({**env, "NODE_RANK": ""}, gpus) == wanted


@pytest.mark.parametrize("secret", ["5" * 64, ""])
def test_a_node_on_azure_has_the_secret_of_its_platform_or_the_name_of_its_job(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {
        "AZUREML_NODE_COUNT": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "6105",
        "AZUREML_RUN_ID": "job-1",
        "REKINDLE_JOB_SECRET": secret,
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert azureml._meet({"nodes": 2, "ranks_per_node": 4}) == 1
    assert "REKINDLE_JOB_SECRET" not in os.environ
    found = Rendezvous.current()
    assert (found.secret, found.job, found.ranks_per_node) == (secret, "job-1", 4)


def test_a_secret_stands_in_the_environment_of_the_child_and_in_no_text() -> None:
    place = Rendezvous(2, 0, 1, "a", 1, secret="5" * 64)
    assert "5" * 64 not in repr(place) + str(place)
    assert Rendezvous(**json.loads(place.environment()[VARIABLE])) == place


MISTAKES = {
    "a global rank": (
        kubeflow.rendezvous,
        {"PET_NNODES": "2", "PET_NODE_RANK": "9", "PET_MASTER_ADDR": "a"},
        "node 9 of 2",
    ),
    "no number": (
        kubeflow.rendezvous,
        {"PET_NNODES": "two", "PET_NODE_RANK": "0"},
        "not a whole number",
    ),
    "nothing": (kubeflow.rendezvous, {}, "no `PET_NNODES`"),
    "no address": (kubeflow.rendezvous, {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "no address"),
    "no JSON": (vertex.rendezvous, {"CLUSTER_SPEC": "{"}, "cannot be read"),
    "no pool 0": (
        vertex.rendezvous,
        {"CLUSTER_SPEC": '{"cluster": {}, "task": {"type": "workerpool0", "index": 0}}'},
        "cannot be read",
    ),
    "not in the cluster": (
        vertex.rendezvous,
        {
            "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool1", "index": 0}}'
        },
        "not in its cluster",
    ),
    "a process's rank": (
        azureml.rendezvous,
        {"AZUREML_NODE_COUNT": "2", "RANK": "7", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "node 7 of 2",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_makes_no_sense_is_an_error_at_the_start(case: str) -> None:
    read, environment, says = MISTAKES[case]
    with pytest.raises(RequestError, match=says):
        read(environment, 8)


def test_a_host_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "resourceconfig.json"
    path.write_text('{"hosts": ["algo-1"], "current_host": "algo-2"}')
    with pytest.raises(RequestError, match="algo-2 is not one of algo-1"):
        sagemaker.rendezvous(0, path)
    with pytest.raises(RequestError, match="cannot be read"):
        sagemaker.rendezvous(0, tmp_path / "gone.json")


def test_a_process_that_is_handed_nonsense_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        VARIABLE, json.dumps({"nodes": 2, "node_rank": 8, "address": "a", "port": 1})
    )
    with pytest.raises(RequestError, match="node 8 of 2"):
        Rendezvous.current()
