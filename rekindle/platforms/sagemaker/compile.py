"""A pipeline for SageMaker Pipelines: a definition of schema 2020-12-01, written by us,
and the bundles that its steps run.

Pure and byte-stable. The Graph is flattened, because SageMaker knows neither nested
pipelines nor loops over lists. Each step is a job that runs `entry.py` of its bundle.
Outputs go under `<artifact_root>/runs/<execution>`; inputs name the steps they come from,
so that the service's own cache key (image, environment, inputs) survives a recompile.

Authority: the SDK's own step classes (sagemaker 3.27) and botocore's model. Untested
against a real account."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem, SpecError
from rekindle.ir.flatten import Flat, Given, Output, flatten, read_by
from rekindle.ir.graph import Graph, Step
from rekindle.ir.values import bind
from rekindle.platforms.bundle import RESULT, scalar
from rekindle.platforms.feature_checks import known_secrets, lacks, refusal
from rekindle.platforms.sagemaker import conditions, jobs
from rekindle.platforms.sagemaker.conditions import divided
from rekindle.platforms.sagemaker.limits import ECR, limits
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition
from rekindle.protojson import Json

_TYPES = {"NUMBER_INTEGER": "Integer", "NUMBER_DOUBLE": "Float", "BOOLEAN": "Boolean"}
_CACHE_EXPIRES = "P30D"
# machines with GPUs are scarce: look again every ten minutes for a day
_RETRY_FOR_CAPACITY = {
    "ExceptionType": ["SageMaker.CAPACITY_ERROR", "SageMaker.RESOURCE_LIMIT"],
    "IntervalSeconds": 600,
    "BackoffRate": 1.0,
    "ExpireAfterMin": 1440,
}
_RESULT_FILE = {
    "PropertyFiles": [
        {"PropertyFileName": "result", "OutputName": RESULT, "FilePath": "result.json"}
    ]
}


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: SageMakerSpec
) -> Definition:
    """`<pipeline>.sagemaker.json`, and `bundles/<hash>/...` that belong under
    `artifact_root`; RequestError with everything that is wrong."""
    known = known_secrets(graph, place.secrets, lambda step: jobs.gets_secrets(step, place))
    place_problems = _problems_of_place(graph, place)
    problems = lacks(graph, "sagemaker", place_problems, known, place.unproven, arguments)
    if problems:
        # the jobs' problems are wanted, too: examples stand for the fields that are wrong
        examples = {name: needed.example for name, needed in place.needed().items()}
        place = place.model_copy(update=examples)
    builder = _PipelineBuilder(graph, bind(graph, arguments), place)
    definition = builder.definition()
    problems += builder.jobs.problems
    if problems:
        raise refusal(problems)
    text = json.dumps(definition, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    if len(text.encode()) > limits()["definition_bytes"]:
        message = f"the definition has {len(text.encode()):,} bytes, more than SageMaker takes"
        raise SpecError(message, where=graph.name, fix="divide the pipeline")
    files = {
        f"{graph.name}.sagemaker.json": f"{text}\n".encode(),
        **builder.jobs.bundles,
    }
    return Definition(files)


def _problems_of_place(graph: Graph, place: SageMakerSpec) -> Iterator[Problem]:
    """What is wrong with the config's section for this pipeline."""
    yield from place.missing("compile")
    if place.artifact_root and not place.artifact_root.startswith("s3://"):
        yield Problem(
            f"`{place.artifact_root}` is out of reach for SageMaker, which keeps everything in S3",
            "platforms.sagemaker.artifact_root",
            "name a folder of a bucket: s3://my-bucket/rekindle",
        )
    for step in graph.steps():
        runs_in_ours = step.container.source and not ECR.fullmatch(step.container.image)
        if runs_in_ours and not ECR.fullmatch(place.image or ""):
            yield Problem(
                f"the image of `{step.path}` ({step.container.image}) is not in ECR",
                "platforms.sagemaker.image",
                "name one in ECR (Python components run in it) as NAME:TAG, then "
                "rekindle images build and push CONFIG",
            )
            break  # one image is the fix for all of them
    if place.image and "@sha256:" not in place.image:
        yield Problem(
            f"`{place.image}` is a mutable tag",
            "platforms.sagemaker.image",
            "rekindle images push CONFIG notes its digest; or say ...amazonaws.com/NAME@sha256:...",
        )


class _PipelineBuilder:
    """One compilation: the flat steps, their jobs, and the problems found so far."""

    def __init__(self, graph: Graph, values: Mapping[str, Any], place: SageMakerSpec) -> None:
        self.graph = graph
        types = {name: parameter.type for name, parameter in graph.inputs.parameters.items()}
        fixed = frozenset(name for name, value in values.items() if _is_fixed(value))
        all_flats = {flat.path: flat for flat in flatten(graph, values)}
        self.parameters_read: set[str] = set()
        for flat in all_flats.values():
            if isinstance(flat.step, Step):
                inputs = (source for source in read_by(flat) if isinstance(source, Given))
                self.parameters_read.update(source.name for source in inputs)
        self.flats, guarded = divided(all_flats, values)
        names = jobs.names_of([*self.flats, *map(_result_key, self.flats)])
        self.jobs = jobs.Jobs(place, self.flats, guarded, names, types, values, fixed)
        # paths of the steps whose results Condition steps read
        self.compared: set[str] = set()
        for flat in self.flats.values():
            for guard in flat.guards:
                for source in guard.values.values():
                    if isinstance(source, Output):
                        self.compared.add(source.path)

    def definition(self) -> Json:
        """What CreatePipeline takes."""
        steps = [flat for flat in self.flats.values() if isinstance(flat.step, Step)]
        if not re.fullmatch(limits()["pipeline_name"], self.graph.name):
            how = f"`{self.graph.name}` is not a name of a pipeline there"
            self.jobs.refuse("", "pipelineInfo.name", how, "use letters, digits and -")
        parameters = self._pipeline_parameters()
        most_parameters = limits()["parameters"]
        if len(parameters) > most_parameters:
            how = f"it has {len(parameters)} parameters, an execution takes {most_parameters}"
            self.jobs.refuse("", self.graph.name, how, "join some of them in a struct")
        nested = self._nested(steps, ())
        # conditions and what is inside of them count as steps there
        most_steps = limits()["steps"]
        step_count = sum(_step_count(step) for step in nested)
        if step_count > most_steps:
            how = f"its {len(steps)} steps are {step_count} there, SageMaker takes {most_steps}"
            self.jobs.refuse("", self.graph.name, how, "divide it, or join steps")
        return {
            "Version": "2020-12-01",
            "Metadata": {},
            "Parameters": parameters,
            "Steps": nested,
        }

    def _pipeline_parameters(self) -> list[Json]:
        """The parameters that a run can be given and that steps read."""
        parameters = []
        for name, value in self.jobs.values.items():
            if name in self.parameters_read and name not in self.jobs.fixed:
                kind = _type_of(self.jobs.types[name], value)
                parameter = {"Name": name, "Type": kind, "DefaultValue": scalar(value)}
                parameters.append(parameter)
        return parameters

    def _nested(self, flats: Sequence[Flat], around: tuple[str, ...]) -> list[Json]:
        """The steps of `flats`, those with the same guards in a Condition step; `around`
        are the paths of the guards whose Condition steps these are in."""
        steps: list[Json] = []
        written_guards: set[str] = set()
        for flat in flats:
            inner = next((guard for guard in flat.guards if guard.path not in around), None)
            if inner is None:
                steps += self._steps(flat)
            elif inner.path not in written_guards:
                inside = [f for f in flats if _has_guard(f, inner.path)]
                compared = conditions.lowered(inner, self._operand)
                branch = self._nested(inside, (*around, inner.path))
                condition = {
                    "Name": jobs.condition_name(inner.path),
                    "Type": "Condition",
                    "Arguments": {
                        "Conditions": compared,
                        "IfSteps": branch,
                        "ElseSteps": [],
                    },
                }
                steps.append(condition)
                written_guards.add(inner.path)
        return steps

    def _operand(self, source: Given | Output) -> object:
        """A value that a condition compares."""
        if isinstance(source, Given):
            if source.name not in self.jobs.fixed and not source.keys:
                return {"Get": f"Parameters.{source.name}"}
            value = self.jobs.values[source.name]
            for key in source.keys:
                value = value[key]
            return value
        producer = source.path
        if jobs.is_training(self.flats[source.path].step):
            producer = _result_key(source.path)  # a Training job has no property files
        file = {"Get": f"Steps.{self.jobs.names[producer]}.PropertyFiles.result"}
        path = "parameters"
        for key in (source.name, *source.keys):
            path += f".{key}" if re.fullmatch(r"\w+", key) else f"['{key}']"
        return {"Std:JsonGet": {"PropertyFile": file, "Path": path}}

    def _steps(self, flat: Flat) -> list[Json]:
        """The step, and the one that repeats its result where conditions read that."""
        steps = [self._step(flat)]
        if flat.path in self.compared and jobs.is_training(flat.step):
            name = self.jobs.names[_result_key(flat.path)]
            arguments = self.jobs.result_copy(flat, name)
            result_copy = {"Name": name, "Type": "Processing", "Arguments": arguments}
            steps.append(result_copy | _RESULT_FILE)
        return steps

    def _step(self, flat: Flat) -> Json:
        step = flat.step
        assert isinstance(step, Step)
        kind, arguments = self.jobs.job_of(flat)
        name = self.jobs.names[flat.path]
        lowered: Json = {"Name": name, "Type": kind, "Arguments": arguments}
        if kind == "Processing":  # a Training job has no property files
            lowered |= _RESULT_FILE
        waits = self._waits(flat)
        if waits and step.always:
            # a step of an exit handler runs however they ended: new in the service, not yet proven
            lowered["DependsOn"] = [{"Step": wait, "Trigger": "Any"} for wait in waits]
        elif waits:
            lowered["DependsOn"] = waits
        if step.cache:
            lowered["CacheConfig"] = {"Enabled": True, "ExpireAfter": _CACHE_EXPIRES}
        policies = _retry_policies(step)
        if policies:
            lowered["RetryPolicies"] = policies
        return lowered

    def _waits(self, flat: Flat) -> list[str]:
        """The names of the steps that the step waits for without reading what they
        leave."""
        # the service waits for what is read anyway
        read = {source.path for source in read_by(flat) if isinstance(source, Output)}
        names = set()
        for path in flat.after:
            if path not in read and isinstance(self.flats[path].step, Step):
                names.add(self._end_of(path, flat))
        return sorted(names)

    def _end_of(self, path: str, flat: Flat) -> str:
        """What `flat` waits for until the step at `path` ended: it, or the outermost
        Condition step around it that is not around `flat`, too."""
        shared = {guard.path for guard in flat.guards}
        for guard in self.flats[path].guards:
            if guard.path not in shared:
                return jobs.condition_name(guard.path)
        return self.jobs.names[path]


def _retry_policies(step: Step) -> list[Json]:
    """What the service tries again;
    a step's own failures are tried again in its container."""
    policies: list[Json] = []
    if jobs.is_training(step):
        policies.append(_RETRY_FOR_CAPACITY)
    if step.retry.count:
        policies.append(
            {
                "ExceptionType": [
                    "Step.SERVICE_FAULT",
                    "Step.THROTTLING",
                    "SageMaker.JOB_INTERNAL_ERROR",
                ],
                "IntervalSeconds": max(1, round(step.retry.pause_seconds)),
                "BackoffRate": step.retry.factor,
                "MaxAttempts": step.retry.count,
            }
        )
    return policies


def _has_guard(flat: Flat, path: str) -> bool:
    return any(guard.path == path for guard in flat.guards)


def _type_of(kind: str, value: object) -> str:
    """The service's type of a parameter.
    As KFP, it may be given a fraction for a whole number."""
    if kind == "NUMBER_INTEGER" and isinstance(value, float):
        return "Float"
    return _TYPES.get(kind, "String")


def _result_key(path: str) -> str:
    """The key of the job that repeats what a Training job returned; no path ends so."""
    return f"{path}/result/"


def _step_count(step: Json) -> int:
    """How many steps the service sees in a step:
    itself, and all that are nested in it."""
    count = 1
    for branch in ("IfSteps", "ElseSteps"):
        for nested in step["Arguments"].get(branch, ()):
            count += _step_count(nested)
    return count


def _is_fixed(value: object) -> bool:
    """Whether a run cannot be given it:
    a job's environment takes 256 characters a value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return not text or len(text) > limits()["environment_characters"]
