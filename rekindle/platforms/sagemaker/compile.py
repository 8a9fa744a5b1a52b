"""A pipeline for SageMaker Pipelines: a definition of schema 2020-12-01, written by us, and the
bundles that its steps run.

Pure and byte-stable. The Graph is flattened, because SageMaker knows neither nested pipelines nor
loops over lists. Each step is a job that runs `entry.py` of its bundle. Outputs go under
`<artifact_root>/runs/<execution>`; inputs name the steps they come from, so that the service's own
cache key (image, environment, inputs) survives a recompile.

Authority: the SDK's own step classes (sagemaker 3.27) and botocore's model. Untested against a real
account."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.catalog.tables import limits
from rekindle.errors import Problem, SpecError
from rekindle.ir.flatten import Flat, Given, Output, flatten, read_by
from rekindle.ir.graph import Graph, Step
from rekindle.ir.values import bind
from rekindle.platforms.bundle import RESULT, scalar
from rekindle.platforms.feature_checks import known_secrets, lacks, refusal
from rekindle.platforms.sagemaker import conditions, jobs
from rekindle.platforms.sagemaker.conditions import divided
from rekindle.platforms.submission import Definition, problems_in, requests_in
from rekindle.platforms.user_code import ECR
from rekindle.spec.platforms import SageMakerSpec

_TYPES = {"NUMBER_INTEGER": "Integer", "NUMBER_DOUBLE": "Float", "BOOLEAN": "Boolean"}
_EXPIRES = "P30D"
_problem, _request = problems_in(__file__), requests_in(__file__)


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: SageMakerSpec
) -> Definition:
    """`<pipeline>.sagemaker.json`, and `bundles/<hash>/...` that belong under `artifact_root`;
    RequestError with everything that is wrong."""
    known = known_secrets(graph, place.secrets, lambda step: jobs.gets_secrets(step, place))
    here = _of_place(graph, place)
    problems = lacks(graph, "sagemaker", here, known, place.unproven, arguments)
    if problems:  # jobs are looked at with examples in the place of what is wrong
        examples = {name: needed.example for name, needed in place.needed().items()}
        place = place.model_copy(update=examples)
    compiler = _Compiler(graph, bind(graph, arguments), place)
    definition = compiler.definition()
    problems += compiler.jobs.problems
    if problems:
        raise refusal(problems)
    text = json.dumps(definition, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    if len(text.encode()) > limits("sagemaker")["definition_bytes"]:
        what = f"the definition has {len(text.encode()):,} bytes, more than SageMaker takes"
        raise SpecError(what, where=graph.name, fix="divide the pipeline")
    files = {f"{graph.name}.sagemaker.json": f"{text}\n".encode(), **compiler.jobs.bundles}
    return Definition(files)


def _of_place(graph: Graph, place: SageMakerSpec) -> Iterator[Problem]:
    yield from place.missing("compile")
    if place.artifact_root and not place.artifact_root.startswith("s3://"):
        yield _problem("out_of_reach", place=place)
    ours = [s for s in graph.steps() if s.container.source and not ECR.fullmatch(s.container.image)]
    if ours and not ECR.fullmatch(place.image or ""):
        yield _problem("not_in_ecr", step=ours[0])
    if place.image and "@sha256:" not in place.image:
        yield _problem("mutable_tag", place=place)


class _Compiler:
    """One compilation: the flat steps, their jobs, and the problems found so far."""

    def __init__(self, graph: Graph, values: Mapping[str, Any], place: SageMakerSpec) -> None:
        self.graph = graph
        types = {name: parameter.type for name, parameter in graph.inputs.parameters.items()}
        fixed = frozenset(name for name, value in values.items() if _is_fixed(value))
        flats = {flat.path: flat for flat in flatten(graph, values)}
        steps = [flat for flat in flats.values() if isinstance(flat.step, Step)]
        self.read = {s.name for flat in steps for s in read_by(flat) if isinstance(s, Given)}
        self.flat, guarded = divided(flats, values)
        names = jobs.names_of([*self.flat, *map(_result_of, self.flat)])
        self.jobs = jobs.Jobs(place, self.flat, guarded, names, types, values, fixed)
        read = [guard.values.values() for flat in self.flat.values() for guard in flat.guards]
        self.compared = {s.path for several in read for s in several if isinstance(s, Output)}

    def definition(self) -> dict[str, Any]:
        """What CreatePipeline takes."""
        steps = [flat for flat in self.flat.values() if isinstance(flat.step, Step)]
        if not re.fullmatch(limits("sagemaker")["pipeline_name"], self.graph.name):
            how = f"`{self.graph.name}` is not a name of a pipeline there"
            self.jobs.beyond("", "pipelineInfo.name", how, "use letters, digits and -")
        parameters = [
            {
                "Name": name,
                "Type": _type_of(self.jobs.types[name], value),
                "DefaultValue": scalar(value),
            }
            for name, value in self.jobs.values.items()
            if name in self.read - self.jobs.fixed
        ]
        most = limits("sagemaker")["parameters"]
        if len(parameters) > most:
            how = f"it has {len(parameters)} parameters, an execution takes {most}"
            self.jobs.beyond("", self.graph.name, how, "join some of them in a struct")
        nested = self._nested(steps, ())
        # conditions and what is inside of them count as steps there
        most, there = limits("sagemaker")["steps"], sum(map(_counted, nested))
        if there > most:
            how = f"its {len(steps)} steps are {there} there, SageMaker takes {most}"
            self.jobs.beyond("", self.graph.name, how, "divide it, or join steps")
        return {"Version": "2020-12-01", "Metadata": {}, "Parameters": parameters, "Steps": nested}

    def _nested(self, steps: Sequence[Flat], guards: tuple[str, ...]) -> list[dict[str, Any]]:
        """Steps, those with the same guards in a Condition step."""
        found, done = list[dict[str, Any]](), set[str]()
        for flat in steps:
            inner = next((guard for guard in flat.guards if guard.path not in guards), None)
            if inner is None:
                found += self._steps(flat)
            elif inner.path not in done:
                inside = [s for s in steps if inner.path in [guard.path for guard in s.guards]]
                compared = conditions.lowered(inner, self._operand)
                branch = self._nested(inside, (*guards, inner.path))
                name = jobs.condition_name(inner.path)
                found.append(_request("condition", name=name, conditions=compared, steps=branch))
                done.add(inner.path)
        return found

    def _operand(self, source: Given | Output) -> Any:
        """A value that a condition compares."""
        if isinstance(source, Given):
            if source.name not in self.jobs.fixed and not source.keys:
                return {"Get": f"Parameters.{source.name}"}
            value = self.jobs.values[source.name]
            for key in source.keys:
                value = value[key]
            return value
        training = jobs.is_training(self.flat[source.path].step)
        producer = self.jobs.names[_result_of(source.path) if training else source.path]
        keys = (source.name, *source.keys)
        steps = [f".{key}" if re.fullmatch(r"\w+", key) else f"['{key}']" for key in keys]
        file = {"Get": f"Steps.{producer}.PropertyFiles.result"}
        return {"Std:JsonGet": {"PropertyFile": file, "Path": "parameters" + "".join(steps)}}

    def _steps(self, flat: Flat) -> list[dict[str, Any]]:
        """The step, and what comes with it."""
        found = [self._step(flat)]
        if flat.path in self.compared and jobs.is_training(flat.step):
            name = self.jobs.names[_result_of(flat.path)]
            arguments = self.jobs.repeated(flat, name)
            repeated = {"Name": name, "Type": "Processing", "Arguments": arguments}
            found.append(repeated | _RESULT_FILE)
        return found

    def _step(self, flat: Flat) -> dict[str, Any]:
        step = flat.step
        assert isinstance(step, Step)
        kind, arguments = self.jobs.of(flat)
        name = self.jobs.names[flat.path]
        found: dict[str, Any] = {"Name": name, "Type": kind, "Arguments": arguments}
        if kind == "Processing":
            found |= _RESULT_FILE
        read = {s.path for s in read_by(flat) if isinstance(s, Output)}  # waited for anyway
        after = [p for p in flat.after if p not in read and isinstance(self.flat[p].step, Step)]
        if waits := sorted({self._end_of(path, flat) for path in after}):
            # a step of an exit handler runs however they ended: new in the service, not yet proven
            any_end = [{"Step": wait, "Trigger": "Any"} for wait in waits]
            found["DependsOn"] = any_end if step.always else waits
        if step.cache:
            found["CacheConfig"] = {"Enabled": True, "ExpireAfter": _EXPIRES}
        policies = [_request("scarce")] if jobs.is_training(step) else []
        if (retry := step.retry).count:
            pause = max(1, round(retry.pause_seconds))
            about = {"factor": retry.factor, "count": retry.count}
            policies.append(_request("fault", pause=pause, **about))
        return found | ({"RetryPolicies": policies} if policies else {})

    def _end_of(self, path: str, flat: Flat) -> str:
        """What to wait for until the step at `path` ended: it, or what is around it."""
        mine = {guard.path for guard in flat.guards}
        others = [g.path for g in self.flat[path].guards if g.path not in mine]
        return jobs.condition_name(others[0]) if others else self.jobs.names[path]


_RESULT = {"PropertyFileName": "result", "OutputName": RESULT, "FilePath": "result.json"}
_RESULT_FILE = {"PropertyFiles": [_RESULT]}


def _type_of(kind: str, value: Any) -> str:
    """The service's type of a parameter. As KFP, it may be given a fraction for a whole number."""
    if kind == "NUMBER_INTEGER" and isinstance(value, float):
        return "Float"
    return _TYPES.get(kind, "String")


def _result_of(path: str) -> str:
    """The key of the job that repeats what a Training job returned; no path ends so."""
    return f"{path}/result/"


def _counted(step: Mapping[str, Any]) -> int:
    """How many steps the service sees in a step: itself, and all that are nested in it."""
    inside = [step["Arguments"].get(key, ()) for key in ("IfSteps", "ElseSteps")]
    return 1 + sum(_counted(one) for steps in inside for one in steps)


def _is_fixed(value: Any) -> bool:
    """Whether a run cannot be given it: a job's environment takes 256 characters a value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return not text or len(text) > limits("sagemaker")["environment_characters"]
