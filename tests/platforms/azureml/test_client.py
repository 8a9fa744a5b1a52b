"""Jobs in a workspace: azure-ai-ml itself, over TLS, against a strict one that is played here."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest

from rekindle.errors import PlatformError, SpecError
from rekindle.platforms.azureml import client
from rekindle.platforms.azureml.client import run_name, submit
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun
from tests.platforms.marks import mark
from tests.quick import only
from tests.servers.azure.rest import Workspace
from tests.servers.troubles import Fault
from tests.support.azureml_client import PLACE, definition
from tests.support.azureml_compile import BEHAVIOUR, compiled


def test_a_job_is_there_with_all_that_it_needs_and_once_for_one_submission(
    service: Workspace,
) -> None:
    made = definition()
    placed = submit(made, PLACE, mark("a"))
    assert placed == SubmittedRun(run_name(made, "a"), placed.url, anew=True)
    assert placed.url.startswith(f"https://ml.azure.com/runs/{placed.id}?wsid=/subscriptions/")
    job = service.jobs[placed.id]["resource"]["properties"]
    assert job["jobs"].keys() == {"make", "condition_1_use"}
    assert job["tags"]["rekindle"] == "true"
    assert RunTag.of(job["tags"]) == mark("a")
    assert job["jobs"]["make"]["identity"] == {"identity_type": "Managed"}
    names = {path.split("/")[-1] for path in service.blobs}
    assert {"entry.py", "task.json", "mounted.py"} <= names
    again = submit(made, PLACE, mark("a"))
    assert again == SubmittedRun(placed.id, placed.url, anew=False)
    assert service.calls["PUT jobs"] == len(service.jobs) == 1
    assert {submit(made, PLACE, mark("b")).id, submit(definition(4), PLACE, mark("a")).id} == (
        service.jobs.keys() - {placed.id}
    )
    assert len(service.jobs) == 3
    assert service.refused == [f"{line}" for line in service.refused if "Job " in line], (
        "nothing but the question for a job that is not there yet is refused"
    )


@pytest.mark.slow
def test_steps_on_several_nodes_of_a_cluster_and_with_gpus_are_taken_too(
    service: Workspace,
) -> None:
    made = compiled(
        BEHAVIOUR.gathered, {"folder": "x"}, **{**PLACE.model_dump(), "compute": "cpus"}
    )
    placed = submit(made, PLACE, mark("a"))
    sent = service.jobs[placed.id]["resource"]["properties"]["jobs"]["gather"]
    assert sent["resources"]["instance_count"] == 3
    assert sent["computeId"].endswith("/computes/cpus")
    missing = compiled(
        BEHAVIOUR.gathered, {"folder": "x"}, **{**PLACE.model_dump(), "compute": "no"}
    )
    with pytest.raises(PlatformError, match=r"jobs\.gather\.compute: .* there is no compute no"):
        submit(missing, PLACE, mark("a"))


# one that is turned away, one whose answer is lost, one that meets itself
QUICK = {"too many calls", "an answer that is lost", "a conflict with ourselves"}
FAULTS: dict[str, list[Fault]] = {
    "too many calls": [Fault("PUT", 429, headers={"Retry-After": "0"}), Fault("POST codes", 429)],
    "a service that is away for a while": [Fault("PUT jobs", 503) for _ in range(7)],
    "an upload that is cut off": [Fault("PUT blob", 0)],
    "code that is there already": [Fault("PUT codes", 0, after=True)],
    "connections that break": [Fault("PUT jobs", 0), Fault("GET jobs", 0)],
    "an answer that is lost": [Fault("PUT jobs", 0, after=True)],
    "a gateway that gave up too early": [Fault("PUT jobs", 504, after=True)],
    "answers that are always lost": [Fault("PUT jobs", 0, after=True) for _ in range(4)],
    "a conflict with ourselves": [Fault("PUT jobs", 409, after=True)],
}


@pytest.mark.parametrize("case", only(QUICK, FAULTS))
def test_whatever_befalls_a_submission_is_one_job(case: str, service: Workspace) -> None:
    service.faults = list(FAULTS[case])
    placed = submit(definition(), PLACE, mark("a"))
    assert service.faults == []
    assert list(service.jobs) == [placed.id]
    assert placed.url


@pytest.mark.slow
def test_a_repeated_call_that_is_told_that_the_job_exists_finds_it(service: Workspace) -> None:
    service.once = True
    service.faults = [Fault("PUT jobs", 0, after=True)]
    placed = submit(definition(), PLACE, mark("a"))
    assert list(service.jobs) == [placed.id]
    assert service.calls["PUT jobs"] == 2


@pytest.mark.slow
def test_two_that_submit_the_same_at_once_make_one_job(service: Workspace) -> None:
    made = definition()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: submit(made, PLACE, mark("a")).id, range(2)))
    assert both == list(service.jobs) * 2


REFUSALS: dict[str, tuple[list[Fault], str]] = {
    "no permission": ([Fault("GET jobs", 403)], "`AzureML Data Scientist`"),
    "no permission to create": ([Fault("PUT jobs", 403)], "`AzureML Data Scientist`"),
    "no permission to upload": ([Fault("PUT blob", 403)], "`Storage Blob Data Contributor`"),
    "nobody knows who it is": ([Fault("PUT components", 401)], "az login"),
    "the service is away": ([Fault("GET jobs", 503) for _ in range(9)], "retry the command"),
    "something the service does not like": ([Fault("PUT environments", 400)], "bug in rekindle"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_helped_is_said_with_a_way_out(case: str, service: Workspace) -> None:
    service.faults, says = list(REFUSALS[case][0]), REFUSALS[case][1]
    with pytest.raises(PlatformError, match=says) as caught:
        submit(definition(), PLACE, mark("a"))
    assert caught.value.problems[0].where == client.where(PLACE)
    assert caught.value.exit_code == 1
    assert service.jobs == {}


def test_a_workspace_that_there_is_not_is_named(service: Workspace) -> None:
    elsewhere = PLACE.model_copy(update={"workspace": "another"})
    with pytest.raises(PlatformError, match=r"platforms\.azureml names the right subscription"):
        submit(definition(), elsewhere, mark("a"))
    with pytest.raises(SpecError, match=r"set platforms\.azureml\.workspace: my-workspace"):
        submit(definition(), AzureMLSpec(), mark("a"))


def test_without_a_login_the_way_to_one_is_said(
    service: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSI_SECRET", "of-another-machine")
    with pytest.raises(PlatformError, match="az login"):
        submit(definition(), PLACE, mark("a"))
    assert service.jobs == {}


def test_a_job_has_a_name_that_the_service_takes(monkeypatch: Any) -> None:
    made = Definition({f"{'x' * 200}.azureml.yaml": b""})
    assert len(run_name(made, "a")) <= 100
    assert run_name(made, "a") == run_name(made, "a") != run_name(made, "b")
