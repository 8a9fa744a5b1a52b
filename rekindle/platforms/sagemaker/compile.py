"""A pipeline for SageMaker Pipelines: a definition of schema 2020-12-01, written by us, and the
bundles that its steps run.

Pure and byte-stable. The Graph is flattened, because SageMaker knows neither nested pipelines nor
loops over lists. Each step is a Processing job that runs `entry.py` of its bundle, a folder under
`<artifact_root>/bundles/<hash>`: code and constants of a KFP executor do not fit into
the 100 x 256 characters of a container's arguments. Outputs go under
`<artifact_root>/runs/<execution>`; inputs name the steps they come from, so that the service's own
cache key (image, environment, inputs) survives a recompile. Every request is checked against the
service's shapes and limits, since no SDK does.

Authority: the SDK's own step classes (sagemaker 3.27) and botocore's model; ../shared/facts/
sagemaker.md. No account has run it yet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.catalog.limits import limits
from rekindle.errors import Problem, SpecError
from rekindle.ir.flatten import Flat, Given, Output, flatten, sources
from rekindle.ir.graph import Graph, Importer, Step
from rekindle.ir.rewrite import OWN_IMAGES
from rekindle.ir.values import bind
from rekindle.launch import shim
from rekindle.platforms import quantities
from rekindle.platforms.admission import admit
from rekindle.platforms.definition import Definition
from rekindle.platforms.sagemaker import conditions, shapes
from rekindle.platforms.sagemaker.bundle import BASE, RESULT, channels_of, task_of
from rekindle.spec.model import SageMakerSpec

_SECTION = "platforms.sagemaker"
_ENTRY = Path(__file__).with_name("entry.py")
_TYPES = {"NUMBER_INTEGER": "Integer", "NUMBER_DOUBLE": "Float", "BOOLEAN": "Boolean"}
_NAMED_BY_THE_SERVICE = frozenset({"ProcessingJobName"})
_ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/.+")
_EXPIRES = "P30D"


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: SageMakerSpec
) -> Definition:
    """`<pipeline>.sagemaker.json`, and `bundles/<hash>/...` that belong under `artifact_root`.

    SpecError with everything that `place` lacks or the service would refuse, UnsupportedError if
    something in the pipeline does not run there, RequestError if the arguments do not fit it.
    """
    admit(graph, "sagemaker")
    if problems := list(_of_place(graph, place)):
        raise SpecError(problems)
    compiler = _Compiler(graph, bind(graph, arguments), place)
    definition = compiler.definition()
    if compiler.problems:
        raise SpecError(dict.fromkeys(compiler.problems))
    text = json.dumps(definition, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    if len(text.encode()) > limits("sagemaker")["definition_bytes"]:
        raise SpecError(
            f"the definition has {len(text.encode()):,} bytes, more than SageMaker takes",
            where=graph.name, fix="divide the pipeline",
        )  # fmt: skip
    files = {f"{graph.name}.sagemaker.json": f"{text}\n".encode(), **compiler.bundles}
    return Definition(files)


def _of_place(graph: Graph, place: SageMakerSpec) -> Iterator[Problem]:
    """What the config's section lacks."""
    examples = {
        "region": "eu-central-1", "role_arn": "arn:aws:iam::123456789012:role/NAME",
        "artifact_root": "s3://my-bucket/rekindle",
    }  # fmt: skip
    for name, example in examples.items():
        if not getattr(place, name):
            yield Problem(
                f"SageMaker needs `{name}`",
                f"{_SECTION}.{name}",
                f"set {_SECTION}.{name}: {example}",
            )
    if place.artifact_root and not place.artifact_root.startswith("s3://"):
        yield Problem(
            f"`{place.artifact_root}` is out of reach for SageMaker, which keeps everything in S3",
            f"{_SECTION}.artifact_root",
            "name a folder of a bucket: s3://my-bucket/rekindle",
        )
    python = [s for s in graph.steps() if s.container.source]
    ours = [s for s in python if not _ECR.fullmatch(s.container.image)]
    if ours and not _ECR.fullmatch(place.image or ""):
        yield Problem(
            f"the image of `{ours[0].path}` ({ours[0].container.image}) is not in ECR",
            f"{_SECTION}.image",
            "push containers/train to ECR and name it by digest; Python components run in it",
        )
    if place.image and "@sha256:" not in place.image:
        yield Problem(
            f"`{place.image}` may be another image tomorrow",
            f"{_SECTION}.image",
            "name it by digest: ...dkr.ecr.REGION.amazonaws.com/NAME@sha256:...",
        )


class _Compiler:
    """One compilation: the flat steps, the names of their jobs, and the problems found so far."""

    def __init__(self, graph: Graph, values: Mapping[str, Any], place: SageMakerSpec) -> None:
        self.graph, self.values, self.place = graph, values, place
        self.root = place.artifact_root.rstrip("/")
        self.problems: list[Problem] = []
        self.bundles: dict[str, bytes] = {}
        self.flat = {flat.path: flat for flat in flatten(graph)}
        self.names = self._names()
        self.fixed = {name for name in values if self._is_fixed(name)}

    def _names(self) -> dict[str, str]:
        """A job name a step: its path, shortened by a hash where it is too long."""
        names: dict[str, str] = {}
        for path in self.flat:
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", path)
            if len(name) > 64 or name in names.values():
                name = f"{name[:55]}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
            names[path] = name
        return names

    def _is_fixed(self, name: str) -> bool:
        """Whether a parameter cannot be given to a run: the environment of a job takes 256
        characters a value."""
        value = self.values[name]
        text = value if isinstance(value, str) else json.dumps(value)
        kind = self.graph.inputs.parameters[name].type
        return len(text) > limits("sagemaker")["environment_characters"] or (
            kind in ("STRING", "LIST", "STRUCT") and not text
        )

    def definition(self) -> dict[str, Any]:
        steps = [flat for flat in self.flat.values() if isinstance(flat.step, Step)]
        rules = limits("sagemaker")
        if len(steps) > rules["steps"]:
            self.problem(
                f"the pipeline has {len(steps)} steps, SageMaker takes {rules['steps']}",
                self.graph.name, "divide it",
            )  # fmt: skip
        if not re.fullmatch(rules["pipeline_name"], self.graph.name):
            self.problem(
                f"`{self.graph.name}` is no name of a pipeline on SageMaker", "pipelineInfo.name",
                "use letters, digits and -",
            )  # fmt: skip
        read = {s.name for flat in steps for s in self._read(flat) if isinstance(s, Given)}
        parameters = [
            {
                "Name": name,
                "Type": _TYPES.get(self.graph.inputs.parameters[name].type, "String"),
                "DefaultValue": self._default(name),
            }
            for name in self.values
            if name in read - self.fixed
        ]
        return {
            "Version": "2020-12-01",
            "Metadata": {},
            "Parameters": parameters,
            "Steps": self._nested(steps, ()),
        }

    def _default(self, name: str) -> Any:
        value = self.values[name]
        return json.dumps(value) if isinstance(value, list | dict) else value

    def _read(self, flat: Flat) -> Iterator[Given | Output]:
        """Everything that the step and its guards read."""
        guards = [s for guard in flat.guards for s in guard.values.values()]
        for source in (*flat.parameters.values(), *flat.artifacts.values(), *guards):
            yield from sources(source)

    def _nested(self, steps: Sequence[Flat], guards: tuple[str, ...]) -> list[dict[str, Any]]:
        """Steps under the same guards become the branch of one Condition step."""
        found: list[dict[str, Any]] = []
        done: set[str] = set()
        for flat in steps:
            inner = [guard for guard in flat.guards if guard.path not in guards]
            if not inner:
                found.append(self._step(flat))
            elif inner[0].path not in done:
                guard = inner[0]
                done.add(guard.path)
                inside = [s for s in steps if guard.path in [g.path for g in s.guards]]
                condition = {
                    "Name": _condition_name(guard.path),
                    "Type": "Condition",
                    "Arguments": {
                        "Conditions": conditions.lowered(guard, self._operand),
                        "IfSteps": self._nested(inside, (*guards, guard.path)),
                        "ElseSteps": [],
                    },
                }
                found.append(condition)
        return found

    def _operand(self, source: Given | Output, where: str) -> Any:
        """A value that a condition compares."""
        if isinstance(source, Given):
            if source.name not in self.values:
                raise SpecError(
                    f"the condition of `{where}` reads `{source.name}`, which has no value",
                    where=source.name, fix="give it a value",
                )  # fmt: skip
            if source.name not in self.fixed and not source.keys:
                return {"Get": f"Parameters.{source.name}"}
            value = self.values[source.name]
            for key in source.keys:
                value = value[key]
            return value
        producer = self.names[source.path]
        keys = (source.name, *source.keys)
        steps = [f".{key}" if re.fullmatch(r"\w+", key) else f"['{key}']" for key in keys]
        return {
            "Std:JsonGet": {
                "PropertyFile": {"Get": f"Steps.{producer}.PropertyFiles.result"},
                "Path": "parameters" + "".join(steps),
            }
        }

    def _step(self, flat: Flat) -> dict[str, Any]:
        step = flat.step
        assert isinstance(step, Step)
        name = self.names[flat.path]
        step_json: dict[str, Any] = {
            "Name": name,
            "Type": "Processing",
            "Arguments": self._job(flat, step, name),
            "PropertyFiles": [
                {"PropertyFileName": "result", "OutputName": RESULT, "FilePath": "result.json"}
            ],
        }
        after = [path for path in flat.after if isinstance(self.flat[path].step, Step)]
        if waits := sorted({self._end_of(path, flat) for path in after}):
            step_json["DependsOn"] = waits
        if step.cache:
            step_json["CacheConfig"] = {"Enabled": True, "ExpireAfter": _EXPIRES}
        if step.retry.count:  # of the service's faults; entry.py retries the step's own
            faults = ["Step.SERVICE_FAULT", "Step.THROTTLING", "SageMaker.JOB_INTERNAL_ERROR"]
            step_json["RetryPolicies"] = [
                {
                    "ExceptionType": faults,
                    "IntervalSeconds": max(1, round(step.retry.pause_seconds)),
                    "BackoffRate": step.retry.factor,
                    "MaxAttempts": step.retry.count,
                }
            ]
        return step_json

    def _end_of(self, path: str, flat: Flat) -> str:
        """What to wait for until the step at `path` ended or will not run: it, or the condition
        around it."""
        mine = {guard.path for guard in flat.guards}
        others = [g.path for g in self.flat[path].guards if g.path not in mine]
        return _condition_name(others[0]) if others else self.names[path]

    def _job(self, flat: Flat, step: Step, name: str) -> dict[str, Any]:
        """The arguments of CreateProcessingJob."""
        bundle = self._bundle(flat, step)
        channels = channels_of(flat, self.flat)
        mounted = {
            "bundle": f"{self.root}/{bundle}",
            **{channel: self._place_of(source) for channel, source in channels.items()},
        }
        variables = self._environment(flat)
        seconds = step.timeout_seconds or 86_400
        job = {
            "AppSpecification": {
                "ImageUri": self._image(step),
                "ContainerEntrypoint": ["python3", f"{BASE}/input/bundle/entry.py"],
            },
            "ProcessingInputs": [_input(channel, uri) for channel, uri in sorted(mounted.items())],
            "ProcessingOutputConfig": {
                "Outputs": [
                    self._output(name, output) for output in (RESULT, *step.outputs.artifacts)
                ]
            },
            "ProcessingResources": {"ClusterConfig": self._cluster(step)},
            "RoleArn": self.place.role_arn,
            "StoppingCondition": {"MaxRuntimeInSeconds": round(seconds)},
        }
        if variables:
            job["Environment"] = variables
        if self.place.kms_key:
            job["ProcessingOutputConfig"]["KmsKeyId"] = self.place.kms_key  # type: ignore[index]
        if self.place.subnets:
            job["NetworkConfig"] = {
                "VpcConfig": {
                    "Subnets": list(self.place.subnets),
                    "SecurityGroupIds": list(self.place.security_groups),
                }
            }
        if self.place.tags:
            job["Tags"] = [{"Key": k, "Value": v} for k, v in sorted(self.place.tags.items())]
        self.problems += shapes.misfits(
            "CreateProcessingJobRequest", job, flat.path, _NAMED_BY_THE_SERVICE
        )
        self._count(flat, len(mounted), len(step.outputs.artifacts) + 1)
        self._check_branches(flat)
        return job

    def _check_branches(self, flat: Flat) -> None:
        mine = {guard.path for guard in flat.guards}
        for source in self._read(flat):
            if not isinstance(source, Output):
                continue
            if any(guard.path not in mine for guard in self.flat[source.path].guards):
                self.problem(
                    f"`{flat.path}` reads what `{source.path}` may not have made, because a "
                    "condition is around it",
                    flat.step.where, "read it under the same condition",
                )  # fmt: skip

    def _count(self, flat: Flat, inputs: int, outputs: int) -> None:
        rules = limits("sagemaker")
        for what, found, most in (
            ("inputs, its bundle and results included", inputs, rules["processing_inputs"]),
            ("outputs, its result included", outputs, rules["processing_outputs"]),
        ):
            if found > most:
                self.problem(
                    f"`{flat.path}` has {found} {what}, a Processing job takes {most}",
                    flat.step.where, "join some of them in one artifact",
                )  # fmt: skip

    def _image(self, step: Step) -> str:
        image = step.container.image
        if image.startswith(OWN_IMAGES) or (step.container.source and not _ECR.fullmatch(image)):
            return self.place.image or image
        return image

    def _cluster(self, step: Step) -> dict[str, Any]:
        asked = step.container.resources
        machine = quantities.machine_for(
            asked.cpu_limit or asked.cpu_request, asked.memory_limit or asked.memory_request,
            self.place.machine, limits("sagemaker")["machines"],
        )  # fmt: skip
        if machine is None:
            self.problem(
                f"no machine has the {asked.cpu_limit} CPUs and {asked.memory_limit} that "
                f"`{step.path}` asks for",
                step.where, "ask for less",
            )  # fmt: skip
        cluster = {
            "InstanceCount": 1,
            "InstanceType": machine or self.place.machine,
            "VolumeSizeInGB": self.place.volume_gb,
        }
        return cluster | ({"VolumeKmsKeyId": self.place.kms_key} if self.place.kms_key else {})

    def _environment(self, flat: Flat) -> dict[str, Any]:
        """The pipeline's parameters that the step reads."""
        names = self._given(flat)
        return {
            f"REKINDLE_P{i}": {"Std:Join": {"On": "", "Values": [{"Get": f"Parameters.{name}"}]}}
            for i, name in enumerate(names)
        }

    def _given(self, flat: Flat) -> list[str]:
        read = [s for source in flat.parameters.values() for s in sources(source)]
        names = dict.fromkeys(s.name for s in read if isinstance(s, Given))
        return [name for name in names if name in self.values and name not in self.fixed]

    def _place_of(self, source: Output | str) -> Any:
        if isinstance(source, str):
            return source
        if isinstance(importer := self.flat[source.path].step, Importer):
            return self._imported(importer)
        return {
            "Get": f"Steps.{self.names[source.path]}.ProcessingOutputConfig."
            f"Outputs['{source.name}'].S3Output.S3Uri"
        }

    def _imported(self, importer: Importer) -> str:
        uri = importer.uri.literal or ""
        if not uri.startswith("s3://"):
            self.problem(
                f"`{importer.path}` imports {uri or 'what a parameter says'}, and SageMaker mounts "
                "what lies in S3",
                importer.where, "copy it to S3, and import it from there",
            )  # fmt: skip
        return uri

    def _output(self, job: str, output: str) -> dict[str, Any]:
        execution = {"Get": "Execution.PipelineExecutionId"}
        return {
            "OutputName": output,
            "AppManaged": False,
            "S3Output": {
                "S3Uri": {
                    "Std:Join": {
                        "On": "/", "Values": [f"{self.root}/runs", execution, job, output],
                    }
                },
                "LocalPath": f"{BASE}/output/{output}",
                "S3UploadMode": "EndOfJob",
            },
        }  # fmt: skip

    def _bundle(self, flat: Flat, step: Step) -> str:
        """Keep the bundle's files; its place under the artifact root."""
        types = {n: p.type for n, p in self.graph.inputs.parameters.items()}
        given = {name: (f"REKINDLE_P{i}", types[name]) for i, name in enumerate(self._given(flat))}
        known = {name: self.values[name] for name in self.fixed}
        task = task_of(flat, step, self.flat, given, known)
        files = {
            "entry.py": _ENTRY.read_bytes(),
            "shim.py": Path(shim.__file__).read_bytes(),
            "task.json": json.dumps(task, sort_keys=True, allow_nan=False).encode(),
        }
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        folder = f"bundles/{digest.hexdigest()[:32]}"
        self.bundles |= {f"{folder}/{name}": content for name, content in files.items()}
        return folder

    def problem(self, what: str, where: str, fix: str) -> None:
        self.problems.append(Problem(what, where, fix))


def _condition_name(path: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"if-{path}")
    if len(name) <= 64:
        return name
    return f"{name[:55]}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def _input(channel: str, uri: Any) -> dict[str, Any]:
    return {
        "InputName": channel,
        "AppManaged": False,
        "S3Input": {
            "S3Uri": uri,
            "LocalPath": f"{BASE}/input/{channel}",
            "S3DataType": "S3Prefix",
            "S3InputMode": "File",
            "S3DataDistributionType": "FullyReplicated",
            "S3CompressionType": "None",
        },
    }
