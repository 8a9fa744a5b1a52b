"""PipelineJobs and schedules in a project: Google's own client, over TLS, against a strict one that is
played here."""

from __future__ import annotations

import concurrent.futures
import json

import pytest

from rekindle.errors import PlatformError, SpecError
from rekindle.platforms.vertex.client import labels_of, run_name, submit
from rekindle.platforms.vertex.platform import Vertex
from rekindle.platforms.vertex.section import VertexSpec
from tests.platforms.marks import mark
from tests.platforms.vertex.project import project as project
from tests.servers.google.rest import PARENT, PROJECT, REGION, Project
from tests.servers.troubles import Fault
from tests.support.vertex_client import PLACE, definition


def test_a_job_is_there_and_once_for_one_submission(project: Project) -> None:
    made = definition()
    placed = submit(made, PLACE, mark("a"))
    assert placed.anew
    assert placed.id == f"{PARENT}/pipelineJobs/{run_name(made, 'a')}"
    assert placed.url.endswith(f"/runs/{run_name(made, 'a')}?project={PROJECT}")
    job = project.jobs[placed.id]
    assert dict(job.labels) == {"rekindle": "true", **labels_of(mark("a"))}
    assert job.runtime_config.parameter_values["text"] == "a"
    again = submit(made, PLACE, mark("a"))
    assert (again.id, again.anew) == (placed.id, False)
    others = {submit(made, PLACE, mark("b")).id, submit(definition("b"), PLACE, mark("a")).id}
    assert project.jobs.keys() == {placed.id, *others}
    assert len(others) == 2


FAULTS: dict[str, list[Fault]] = {
    "too many calls": [Fault("POST pipelineJobs", 429)] * 2,
    "a service that is away for a while": [Fault("POST pipelineJobs", 503) for _ in range(5)],
    "connections that break": [Fault("POST pipelineJobs", 0)],
    "an answer that is lost": [Fault("POST pipelineJobs", 0, after=True)],
    "a gateway that gave up too early": [Fault("POST pipelineJobs", 504, after=True)],
}


@pytest.mark.parametrize("case", FAULTS)
def test_whatever_befalls_a_submission_is_one_job(case: str, project: Project) -> None:
    project.faults = list(FAULTS[case])
    placed = submit(definition(), PLACE, mark("a"))
    assert project.faults == []
    assert list(project.jobs) == [placed.id]


def test_two_that_submit_the_same_at_once_make_one_job(project: Project) -> None:
    made = definition()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: submit(made, PLACE, mark("a")).id, range(2)))
    assert both == list(project.jobs) * 2


REFUSALS: dict[str, tuple[Fault, str]] = {
    "no permission": (Fault("POST pipelineJobs", 403), "rekindle doctor CONFIG --platform vertex"),
    "nobody knows who it is": (Fault("POST pipelineJobs", 401), "gcloud auth application-default"),
    "no such project": (Fault("POST pipelineJobs", 404), "names the right project and region"),
    "something the service does not like": (Fault("POST pipelineJobs", 400), "bug in rekindle"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_helped_is_said_with_a_way_out(case: str, project: Project) -> None:
    fault, says = REFUSALS[case]
    project.faults = [fault] * 4
    with pytest.raises(PlatformError, match=says) as caught:
        submit(definition(), PLACE, mark("a"))
    assert caught.value.problems[0].where == f"project {PROJECT} in {REGION}"
    assert project.jobs == {}


def test_what_the_config_lacks_and_a_login_that_is_not_there_are_said(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"set platforms\.vertex\.region: europe-west4"):
        submit(definition(), VertexSpec(), mark("a"))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with pytest.raises(PlatformError, match="gcloud auth application-default login"):
        submit(definition(), PLACE, mark("a"))
    assert project.calls == {}


def test_what_will_be_made_is_said_before() -> None:
    made = definition()
    planned = Vertex(PLACE).preview(made, "a")
    assert planned.id == run_name(made, "a")
    names = [one.step for one in planned.steps]
    assert names == ["make", "use", "count"], "one that reads another one follows it"
    spec = json.loads(next(iter(made.files.values())))
    assert len(planned.steps) == len(spec["pipelineSpec"]["deploymentSpec"]["executors"])
