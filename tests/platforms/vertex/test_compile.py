"""The definition for Vertex AI: the body of a PipelineJob, and what is refused before it is written."""

import json
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl, kubernetes
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2
from pydantic import ValidationError

from rekindle.catalog.tables import feature_rows
from rekindle.errors import RequestError, SpecError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.vertex.compile import compile
from rekindle.platforms.vertex.section import VertexSpec

DIGEST = "europe-docker.pkg.dev/p/r/train@sha256:" + "0" * 64
PLACE: dict[str, Any] = {
    "project": "my-project",
    "region": "europe-west4",
    "artifact_root": "gs://bucket/rekindle/",
    "service_account": "me@my-project.iam.gserviceaccount.com",
    "labels": {"team": "search"},
    "network": "projects/12/global/networks/net",
    "image": DIGEST,
    "kms_key": "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k",
}


@dsl.component(base_image="rekindle/train:0.1.0", install_kfp_package=False)
def ours(n: int, items: list) -> int:
    return n


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def theirs(n: int, text: str):
    print(n)


@dsl.pipeline(name="two-steps")
def pipeline(n: int, text: str = "a", items: list = [1]):  # noqa: B006
    first = ours(n=n, items=items).set_accelerator_type("NVIDIA_L4").set_accelerator_limit(1)
    theirs(n=first.output, text=text)


def compiled(made: Any, arguments: dict[str, object] | None = None, **place: Any) -> dict[str, Any]:
    text = compile_function(made)
    definition = compile(text, read(text), arguments or {}, VertexSpec(**{**PLACE, **place}))
    ((name, content),) = definition.files.items()
    assert name == f"{made.name}.vertex.json"
    found: dict[str, Any] = json.loads(content)
    return found


def test_every_field_of_the_section_reaches_the_job() -> None:
    job = compiled(pipeline, {"n": 3, "text": "é"})
    spec = job.pop("pipelineSpec")
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    assert job == {
        "displayName": "two-steps",
        "runtimeConfig": {
            "gcsOutputDirectory": "gs://bucket/rekindle/pipeline",
            "parameterValues": {"n": 3, "text": "é", "items": [1]},
        },
        "labels": {"rekindle": "true", "team": "search"},
        "serviceAccount": PLACE["service_account"],
        "network": PLACE["network"],
        "encryptionSpec": {"kmsKeyName": PLACE["kms_key"]},
    }
    images = {e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values()}
    assert images == {DIGEST, "python:3.11"}
    assert read(json.dumps(spec)).dag.nodes.keys() == {"ours", "theirs"}


def test_what_the_section_leaves_out_the_job_leaves_out() -> None:
    job = compiled(pipeline, {"n": 1}, service_account="", network="", kms_key="", labels={})
    assert job.keys() == {"displayName", "pipelineSpec", "runtimeConfig", "labels"}


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ({"project": ""}, "platforms.vertex.project", "needs `project`"),
        ({"region": ""}, "platforms.vertex.region", "needs `region`"),
        ({"artifact_root": ""}, "platforms.vertex.artifact_root", "needs `artifact_root`"),
        ({"artifact_root": "s3://b"}, "platforms.vertex.artifact_root", "out of reach"),
        ({"image": None}, "platforms.vertex.image", "platforms.vertex.image is not set"),
        ({"image": "a/b:latest"}, "platforms.vertex.image", "has no digest; on Vertex AI"),
        ({"labels": {"Team": "a"}}, "platforms.vertex.labels", "not a key of a label"),
        ({"labels": {"team": "A b"}}, "platforms.vertex.labels.team", "not a value of a label"),
        ({"labels": {f"l{i}": "" for i in range(65)}}, "platforms.vertex.labels", "too many"),
    ],
)
def test_a_section_that_does_not_do_is_refused_where_it_stands(
    change: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        compiled(pipeline, {"n": 1}, **change)
    assert [problem.where for problem in caught.value.problems] == [where]
    assert caught.value.problems[0].fix


def test_all_that_a_section_lacks_is_said_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        compiled(pipeline, {"n": 1}, project="", region="", artifact_root="", image=None)
    assert len(caught.value.problems) == 4


def test_an_unknown_accelerator_and_an_unusable_name_are_refused() -> None:
    @dsl.pipeline(name="named")
    def named() -> None:
        theirs(n=1, text="").set_accelerator_type("NVIDIA_H9000").set_accelerator_limit(1)

    text = compile_function(named).replace("name: named", "name: A_name")
    with pytest.raises(RequestError) as caught:
        compile(text, read(text), {}, VertexSpec(**PLACE))
    first, second = map(str, caught.value.problems)
    assert "not a name of a pipeline" in first
    assert "accelerator NVIDIA_H9000" in second
    assert "NVIDIA_H200_141GB" in second


def test_settings_of_pods_are_refused_by_name_and_source() -> None:
    @dsl.pipeline(name="pods")
    def pods() -> None:
        task = theirs(n=1, text="")
        kubernetes.mount_pvc(task, pvc_name="data", mount_path="/data")
        kubernetes.use_secret_as_env(task, "login", {"token": "TOKEN"})
        task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)

    with pytest.raises(UnsupportedError) as caught:
        compiled(pods)
    told = "\n".join(map(str, caught.value.problems))
    assert len(caught.value.problems) == 3
    for part in ("persistent volume claims", "platforms.vertex.secrets", "such as NVIDIA_L4"):
        assert part in told


def test_every_setting_of_kfp_kubernetes_is_refused_or_understood() -> None:
    config = kubernetes_executor_config_pb2.KubernetesExecutorConfig.DESCRIPTOR
    names = {field.json_name for field in config.fields}
    understood = {"secretAsEnv": "secrets", "activeDeadlineSeconds": "timeouts"}
    rows = [
        feature_rows()[understood.get(name, name)] for name in names if name != "pipelineConfig"
    ]
    assert len(rows) > 15
    assert [row.name for row in rows if row.on["vertex"].verdict != "refused"] == []


def test_a_second_document_that_says_nothing_is_left_out() -> None:
    empty = "---\nplatforms: {kubernetes: {deploymentSpec: {executors: {exec-ours: {}}}}}\n"
    text = compile_function(pipeline) + empty
    assert compile(text, read(text), {"n": 1}, VertexSpec(**PLACE)).files


def test_steps_of_ours_begin_with_the_secrets_of_the_config() -> None:
    name = "projects/p/secrets/hf/versions/3"
    job = compiled(pipeline, {"n": 1}, secrets={"HF_TOKEN": name})
    commands = {
        label: executor["container"]["command"]
        for label, executor in job["pipelineSpec"]["deploymentSpec"]["executors"].items()
    }
    prefix = ["python3", "-m", "rekindle.platforms.vertex.secrets", f'{{"HF_TOKEN": "{name}"}}']
    assert commands["exec-ours"][:5] == [*prefix, "sh"]
    assert commands["exec-theirs"][0] == "sh"


@dsl.container_component
def shell():
    return dsl.ContainerSpec(image="ghcr.io/a/b:1", command=["sh", "-c", 'echo "$TOKEN $0"', "a b"])


@dsl.container_component
def bare():
    return dsl.ContainerSpec(image="alpine", command=["true"])


@dsl.container_component
def entry_point():
    return dsl.ContainerSpec(image="ghcr.io/a/b:1", args=["--flag"])


def asking(component: Any, *names: str) -> Any:
    @dsl.pipeline(name="asking")
    def made() -> None:
        given = {"n": 1, "text": ""} if component is theirs else {}
        kubernetes.use_secret_as_env(component(**given), "login", {f"key-{n}": n for n in names})

    return made


NAMED = {"TOKEN": "projects/p/secrets/t/versions/1", "OTHER": "projects/p/secrets/o/versions/1"}


@pytest.mark.parametrize("component", [theirs, shell])
def test_an_ordinary_step_gets_the_secrets_that_it_asks_for(component: Any) -> None:
    job = compiled(asking(component, "TOKEN"), secrets=NAMED)
    (executor,) = job["pipelineSpec"]["deploymentSpec"]["executors"].values()
    python, flag, program, names, first, *_ = executor["container"]["command"]
    assert (python, flag, first) == ("python3", "-c", "sh")
    assert json.loads(names) == {"TOKEN": NAMED["TOKEN"]}
    assert not [line for line in program.splitlines() if line.lstrip().startswith("from rekindle")]
    assert "{{$" not in program


@pytest.mark.parametrize(
    ("component", "names", "says"),
    [
        (theirs, ("TOKEN", "THIRD"), "for each of the variables in platforms.vertex.secrets"),
        (entry_point, ("TOKEN",), "before its command"),
        (bare, ("TOKEN",), "alpine has no python3"),
    ],
)
def test_secrets_that_cannot_reach_a_step_are_refused_with_their_place(
    component: Any, names: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says) as caught:
        compiled(asking(component, *names), secrets=NAMED)
    assert all(problem.where for problem in caught.value.problems)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def see(model: dsl.Input[dsl.Model]):
    print(model.uri)


@dsl.pipeline(name="importing")
def importing(place: str = "oci://registry/model:1"):
    see(model=dsl.importer(artifact_uri=place, artifact_class=dsl.Model).output)


def test_an_importer_of_what_vertex_does_not_mount_is_refused_although_a_parameter_says_it() -> (
    None
):
    with pytest.raises(UnsupportedError, match="mounts Cloud Storage only") as caught:
        compiled(importing)
    assert [problem.where for problem in caught.value.problems] == ["root.dag.tasks.importer"]
    assert compiled(importing, {"place": "gs://b/model"})


@pytest.mark.parametrize(
    "secrets", [{"HF_TOKEN": "hf_abcdefgh"}, {"HF-TOKEN": "projects/p/secrets/s/versions/1"}]
)
def test_a_secret_in_clear_or_of_no_variable_is_refused(secrets: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        VertexSpec(secrets=secrets)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RequestError, match="needs `n`"):
        compiled(pipeline)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def reads(model: dsl.Input[dsl.Model]):
    print(model.uri)


@dsl.pipeline(name="left-out")
def left_out(model: dsl.Input[dsl.Model], given: bool = False):
    with dsl.If(given == True):  # noqa: E712 - a condition of KFP
        reads(model=model)


def test_artifacts_that_only_branches_read_may_be_left_out_as_googles_own_pipelines_do() -> None:
    text = compile_function(left_out)
    definition = compile(text, read(text), {}, VertexSpec(**PLACE))
    (notice,) = definition.notices
    assert notice.startswith("the pipeline uses artifacts as arguments of the pipeline: ")
    job = json.loads(definition.text)
    assert job["runtimeConfig"]["parameterValues"] == {"given": False}


def test_googles_resources_and_empty_places_are_imported() -> None:
    @dsl.pipeline(name="resources")
    def resources() -> None:
        reads_any(
            resource=dsl.importer(
                artifact_uri="https://eu-aiplatform.googleapis.com/v1/projects/p/models/1",
                artifact_class=VertexModel,
            ).output
        )

    assert compiled(resources)


class VertexModel(dsl.Artifact):
    """As google-cloud-pipeline-components has it."""

    schema_title = "google.VertexModel"
    schema_version = "0.0.1"


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def reads_any(resource: dsl.Input[dsl.Artifact]):
    print(resource.uri)
