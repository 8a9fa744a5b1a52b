"""A pipeline for Vertex AI Pipelines: the JSON of a PipelineJob, as its API takes it.

Pure: the same input gives the same bytes. Vertex AI runs KFP's own encoding, one document of it;
what the second one holds is refused by the feature table, but for distributed steps, which become
launchers (lowering.py). Limits are those of catalog/vertex.yaml.
Authority: the proto of aiplatform_v1.PipelineJob."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.catalog.tables import limits
from rekindle.errors import Problem
from rekindle.ir.edit import rewrite
from rekindle.ir.graph import Graph, Secret, Step
from rekindle.ir.values import bind
from rekindle.platforms.feature_checks import beyond, known_secrets, lacks, python_problems, refusal
from rekindle.platforms.submission import Definition
from rekindle.platforms.vertex import lowering, secrets
from rekindle.spec.platforms import VertexSpec

_SECTION = "platforms.vertex"
# A launcher that is killed comes back and finds its job; one that gave up gives up again at once
LAUNCHER_RETRIES = 3
_LABEL = "use lower-case letters, digits, - and _, at most 63, beginning with a letter"
_PAUSES = {"backoffDuration": "30s", "backoffFactor": 2.0}


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: VertexSpec
) -> Definition:
    """One JSON file, named after the pipeline: the body of `projects.locations.pipelineJobs.create`
    for `place.project` and `place.region`.

    SpecError with everything that `place` lacks, UnsupportedError if something in the pipeline does
    not run there, RequestError if the arguments do not fit it."""
    known = known_secrets(graph, place.secrets, lambda step: bool(_asked(step, place)))
    wrong = lacks(graph, "vertex", _of_place(graph, place), known, arguments=arguments)
    if found := [*wrong, *_of_graph(graph, place)]:
        raise refusal(found)
    values = bind(graph, arguments)
    folder = f"{place.artifact_root.rstrip('/')}/pipeline"
    job: dict[str, Any] = {
        "displayName": graph.name, "labels": {"rekindle": "true", **place.labels},
        "pipelineSpec": _pipeline(ir_text, graph, place),
        "runtimeConfig": {"gcsOutputDirectory": folder, "parameterValues": values},
    }  # fmt: skip
    key = {"kmsKeyName": place.kms_key} if place.kms_key else None
    more = {"serviceAccount": place.service_account, "network": place.network}
    job |= {name: value for name, value in {**more, "encryptionSpec": key}.items() if value}
    text = json.dumps(job, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return Definition({f"{graph.name}.vertex.json": f"{text}\n".encode()})


def _pipeline(ir_text: str, graph: Graph, place: VertexSpec) -> dict[str, Any]:
    spec, settings = rewrite.rewritten(ir_text, {}, place.image)
    if place.secrets:
        spec = rewrite.prefixed(spec, dict(_secrets(spec, graph, place)))
    # settings that are left say nothing: the feature table refuses every one that does
    spec, _ = rewrite.with_launchers(
        spec, settings, graph, lambda step: lowering.launcher(step, graph.name, place)
    )
    labels = rewrite.distributed(spec, graph)
    return rewrite.with_retries(spec, labels, lambda own: max(own, LAUNCHER_RETRIES), _PAUSES)


def _secrets(
    spec: Mapping[str, Any], graph: Graph, place: VertexSpec
) -> Iterator[tuple[str, list[str]]]:
    """What stands in front of commands that need secrets, by the executor's label."""
    for step in graph.steps():
        label = rewrite.component_of(spec, step)["executorLabel"]
        if rewrite.executors_of(spec)[label]["container"].get("image") == place.image:
            yield label, secrets.starting(place.secrets, True)
        elif asked := {secret.env: place.secrets[secret.env] for secret in _asked(step, place)}:
            yield label, secrets.starting(asked, False)


def _asked(step: Step, place: VertexSpec) -> list[Secret]:
    """The secrets that a step asks for and that the config names; none where nothing can stand in
    front of its command."""
    started = bool(step.container.source or step.container.command)
    return [s for s in step.secrets if s.env in place.secrets] if started else []


def _of_place(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    """What the config's section lacks."""
    yield from place.missing("compile")
    if place.artifact_root and not place.artifact_root.startswith("gs://"):
        what = f"`{place.artifact_root}` is out of reach for Vertex AI, which keeps artifacts in"
        fix = "name a folder of a bucket: gs://my-bucket/rekindle"
        yield Problem(f"{what} Cloud Storage", f"{_SECTION}.artifact_root", fix)
    distributed = [step for step in graph.steps() if step.distribution is not None]
    ours = any(step.container.image.startswith(rewrite.OWN_IMAGES) for step in graph.steps())
    if (ours or distributed) and "@sha256:" not in (place.image or ""):
        who = "rekindle's steps" if ours else "the launcher of a distributed step"
        has = f"`{place.image}` has no digest" if place.image else f"{_SECTION}.image is not set"
        yield Problem(
            f"{has}; on Vertex AI {who} need{'' if who.endswith('s') else 's'} an image with a "
            "digest",
            f"{_SECTION}.image",
            "set it to europe-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, then run rekindle images "
            "build CONFIG and push CONFIG, which writes the digest to rekindle.lock",
        )
    if distributed and not place.service_account:
        what = f"the job of `{distributed[0].path}` needs an account to run as"
        fix = "name the one that steps run as: steps@my-project.iam.gserviceaccount.com"
        yield Problem(what, f"{_SECTION}.service_account", fix)
    rules = limits("vertex")
    room = rules["labels"]["most"] - rules["labels"]["ours"]
    if len(place.labels) > room:
        what = f"{len(place.labels)} labels are too many; there is room for {room}"
        yield Problem(what, f"{_SECTION}.labels", "drop some")
    for key, value in place.labels.items():
        if not re.fullmatch(rules["labels"]["key"], key):
            yield Problem(f"`{key}` is not a key of a label", f"{_SECTION}.labels", _LABEL)
        if not re.fullmatch(rules["labels"]["value"], value):
            at = f"{_SECTION}.labels.{key}"
            yield Problem(f"`{value}` is not a value of a label", at, _LABEL)


def _of_graph(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    """Names that the service would not take, and distributed steps that no job can run."""
    rules = limits("vertex")
    if not re.fullmatch(rules["pipeline_name"], graph.name):
        fix = "use lower-case letters, digits and -, at most 128, beginning with a letter or digit"
        how = f"`{graph.name}` is not a name of a pipeline there"
        yield beyond("vertex", "", "pipelineInfo.name", how, fix)
    for step in graph.steps():
        if step.distribution is not None:
            yield from lowering.problems(step, place)
            continue
        if _asked(step, place):
            yield from python_problems("vertex", step, step.container.image)
        asked = step.container.resources.accelerator_type
        known = rules["accelerators"]
        if asked and "{{$" not in asked and asked not in known:
            how = f"it asks for the accelerator {asked}, which there is not"
            yield beyond("vertex", step.path, step.where, how, f"there is {', '.join(known)}")
