"""The jobs of one compilation for SageMaker: what they are called, where what is theirs lies, and
the one that each step becomes with its bundle: a Processing job on one CPU machine, or a Training
job on several machines or on GPUs.

A Training job has no property files, so a condition on what it returned reads those of a small
Processing job that repeats its result. Every request is held against the service's own shapes and
limits, since no SDK does. Debugger has been closed to new customers since 2026-07-30 and Profiler
ends in 2027, so neither is asked for. Authority: botocore's model of CreateProcessingJob and
CreateTrainingJob."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rekindle.catalog.tables import limits, network
from rekindle.errors import Problem, UnsupportedError
from rekindle.ir.flatten import Flat, Given, Guard, Output, sources
from rekindle.ir.graph import Importer, Step
from rekindle.platforms import bundle
from rekindle.platforms.bundle import RENDEZVOUS, RESULT, channels_of, packed, task_of
from rekindle.platforms.feature_checks import beyond, python_problems
from rekindle.platforms.machines import gpus_of, machine_for
from rekindle.platforms.sagemaker import shapes
from rekindle.platforms.submission import plain_name, problems_in, requests_in
from rekindle.platforms.user_code import ECR
from rekindle.spec.platforms import SageMakerSpec

_ILLEGAL = r"[^A-Za-z0-9_-]+"
_DAY_SECONDS = 86_400
_ENTRY = Path(__file__).with_name("entry.py")
_problem, _request = problems_in(__file__), requests_in(__file__)


def image_of(step: Step, place: SageMakerSpec) -> str:
    """The image that a step runs in: its own, where the service can pull it."""
    image = bundle.image_of(step, place.image)
    return (place.image or image) if step.container.source and not ECR.fullmatch(image) else image


def gets_secrets(step: Step, place: SageMakerSpec) -> bool:
    """Whether the step finds `platforms.sagemaker.secrets` in its environment."""
    return bool(place.secrets) and image_of(step, place) == place.image


def joined(*parts: Any, on: str = "/") -> dict[str, Any]:
    """Text that the service puts together."""
    return {"Std:Join": {"On": on, "Values": list(parts)}}


def is_training(step: Step | Importer) -> bool:
    """Whether the step becomes a Training job: several machines, or GPUs."""
    if isinstance(step, Importer):
        return False
    return step.distribution is not None or bool(step.container.resources.accelerator_type)


def names_of(paths: Iterable[str]) -> dict[str, str]:
    """A job name a step: its path, shortened by a hash where it is too long."""
    names: dict[str, str] = {}
    for path in paths:
        names[path] = plain_name(path, _ILLEGAL, 64, taken=names.values()).strip("-")
    return names


def condition_name(path: str) -> str:
    """The name of the Condition step for the condition at `path`."""
    return plain_name(f"if-{path}", _ILLEGAL, 64)


class Jobs:
    """Makes the jobs of one compilation; keeps their bundles, and what is wrong with them.
    `guarded` are conditions that a step looks at itself, `fixed` parameters that a run cannot
    change."""

    def __init__(
        self,
        place: SageMakerSpec,
        flats: Mapping[str, Flat],
        guarded: Mapping[str, tuple[Guard, ...]],
        names: Mapping[str, str],
        types: Mapping[str, str],
        values: Mapping[str, Any],
        fixed: frozenset[str],
    ) -> None:
        self.place, self.flats, self.guarded, self.names = place, flats, guarded, names
        self.types, self.values, self.fixed = types, values, fixed
        self.problems: list[Problem] = []
        self.bundles: dict[str, bytes] = {}
        self.counted: set[str] = set()  # places in requests whose length is said already

    @property
    def root(self) -> str:
        """The artifact root without a slash at its end."""
        return self.place.artifact_root.rstrip("/")

    def given(self, flat: Flat) -> dict[str, tuple[str, str, str]]:
        """The pipeline's parameters that the step reads from its environment: the variable, its
        type in the IR, and what the definition gets for it."""
        guarding = [s for guard in self.guarded[flat.path] for s in guard.values.values()]
        given = (*flat.parameters.values(), *guarding)
        read = [s for source in given for s in sources(source) if isinstance(s, Given)]
        found: dict[str, tuple[str, str, str]] = {}
        for one in {one.name: one for one in read}.values():
            variable = f"REKINDLE_P{len(found)}"
            if one.name in self.values and one.name not in self.fixed:
                found[one.name] = variable, self.types[one.name], f"Parameters.{one.name}"
        return found

    def uri(self, source: Output) -> Any:
        """Where an output lies, as a property of its job; a Training job's is within its model."""
        producer, name = self.flats[source.path].step, self.names[source.path]
        if isinstance(producer, Importer):
            return producer.uri.literal or ""
        if is_training(producer):
            folder = {"Get": f"Steps.{name}.OutputDataConfig.S3OutputPath"}
            job = {"Get": f"Steps.{name}.TrainingJobName"}
            return joined(folder, job, "output/model", source.name)
        outputs = f"Steps.{name}.ProcessingOutputConfig.Outputs"
        return {"Get": f"{outputs}['{source.name}'].S3Output.S3Uri"}

    def folder(self, job: str, *more: Any) -> dict[str, Any]:
        """What a job of this execution writes to."""
        return joined(f"{self.root}/runs", {"Get": "Execution.PipelineExecutionId"}, job, *more)

    def of(self, flat: Flat) -> tuple[str, dict[str, Any]]:
        """The type of the step and its arguments."""
        step = flat.step
        assert isinstance(step, Step)
        image = image_of(step, self.place)
        # those of Python components give way to the config's, which is looked at on its own
        if not step.container.source and not ECR.fullmatch(image):
            how = f"its image {image} is not in ECR, and a job pulls from nowhere else"
            fix = "copy it to ECR, and name that: NUMBER.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
            self.beyond(step.path, step.where, how, fix)
        self.problems += python_problems("sagemaker", step, image)
        kind = "Training" if is_training(step) else "Processing"
        request = self._training(flat, step) if is_training(step) else self._step(flat, step)
        if environment := self._environment(flat, step):
            request["Environment"] = environment
        return kind, self._finished(kind, request, flat.path)

    def repeated(self, flat: Flat, name: str) -> dict[str, Any]:
        """A Processing job, the step `name`, that repeats what a step's Training job returned."""
        assert isinstance(flat.step, Step)
        inputs = {"bundle": self._keep({"copies": "result-0"})}
        inputs["result-0"] = self.uri(Output(flat.path, RESULT))
        outputs = {RESULT: self.folder(name, RESULT)}
        image = self.place.image or image_of(flat.step, self.place)
        request = self._processing(image, self.place.machine, inputs, outputs, _DAY_SECONDS)
        return self._finished("Processing", request, flat.path)

    def _finished(self, kind: str, request: dict[str, Any], path: str) -> dict[str, Any]:
        request["RoleArn"] = self.place.role_arn
        if self.place.tags:
            request["Tags"] = [{"Key": k, "Value": v} for k, v in sorted(self.place.tags.items())]
        name = frozenset({f"{kind}JobName"})  # the service gives it
        misfits = shapes.misfits(f"Create{kind}JobRequest", request, path, name)
        self.problems += [problem for problem in misfits if problem.where not in self.counted]
        return request

    def _step(self, flat: Flat, step: Step) -> dict[str, Any]:
        job = self.names[flat.path]
        outputs = {o: self.folder(job, o) for o in (RESULT, *step.outputs.artifacts)}
        most = limits("sagemaker")["processing_outputs"]
        self._count(flat, "outputs, its result included", len(outputs), most)
        machine, inputs = self._machine(step), self._inputs(flat, step, "processing")
        seconds = step.timeout_seconds or _DAY_SECONDS
        return self._processing(image_of(step, self.place), machine, inputs, outputs, seconds)

    def _processing(
        self,
        image: str,
        machine: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        """A job on one machine; `inputs` and `outputs` are S3 URIs by name."""
        given = [
            _request("input", name=name, uri=uri, path=f"/opt/ml/processing/input/{name}")
            for name, uri in sorted(inputs.items())
        ]
        left = [
            _request("output", name=name, uri=uri, path=f"/opt/ml/processing/output/{name}")
            for name, uri in outputs.items()
        ]
        around = {"seconds": round(seconds), **self._around(machine, 1)}
        return _request("processing", image=image, inputs=given, outputs=left, **around)

    def _training(self, flat: Flat, step: Step) -> dict[str, Any]:
        """A job that may run on several machines; on spot machines it may also wait for them."""
        seconds, wait_seconds = self._patience(flat, step)
        machine, count = self._machine(step), step.distribution.nodes if step.distribution else 1
        inputs = sorted(self._inputs(flat, step, "training").items())
        return _request(
            "training",
            image=image_of(step, self.place),
            seconds=round(seconds),
            channels=[_request("channel", name=name, uri=uri) for name, uri in inputs],
            folder=self.folder(self.names[flat.path]),
            spot=None if wait_seconds is None else True,
            wait_seconds=None if wait_seconds is None else round(wait_seconds),
            **self._around(machine, count),
        )

    def _around(self, machine: str, count: int) -> dict[str, Any]:
        """A job's machines, network and key."""
        place, key = self.place, self.place.kms_key or None
        about = {"volume": place.volume_gb, "key": key}
        vpc = {"Subnets": [*place.subnets], "SecurityGroupIds": [*place.security_groups]}
        cluster = _request("cluster", count=count, machine=machine, **about)
        return {"cluster": cluster, "key": key, "vpc": vpc if place.subnets else None}

    def _patience(self, flat: Flat, step: Step) -> tuple[float, float | None]:
        """Seconds that the job may run, and on spot machines those that it may wait and run."""
        most = limits("sagemaker")["training_days"] * _DAY_SECONDS
        seconds = step.time_limit_seconds or _DAY_SECONDS
        if seconds > most:
            hours = {"hours": seconds / 3_600, "most": most / 3_600}
            self.problems.append(_problem("long", where=step.where, path=flat.path, **hours))
        if step.distribution is None or not step.distribution.spot:
            return seconds, None
        return seconds, max(seconds, min(seconds + self.place.spot_wait_hours * 3_600, most))

    def _inputs(self, flat: Flat, step: Step, kind: str) -> dict[str, Any]:
        """What the job reads: S3 URIs by channel, its bundle among them."""
        channels = channels_of(flat, self.guarded[flat.path])
        for source in channels.values():
            importer = self.flats[source.path].step
            if isinstance(importer, Importer) and not self.uri(source).startswith("s3://"):
                uri = importer.uri.literal or "what a parameter says"
                self.problems.append(_problem("import", step=importer, uri=uri))
        found = {"bundle": self._keep(self._task(flat, step))}
        found |= {channel: self.uri(source) for channel, source in channels.items()}
        what = "inputs, its bundle and results included"
        self._count(flat, what, len(found), limits("sagemaker")[f"{kind}_inputs"])
        return found

    def _task(self, flat: Flat, step: Step) -> dict[str, Any]:
        given = {name: place[:2] for name, place in self.given(flat).items()}
        known = {name: self.values[name] for name in self.fixed}
        task = task_of(flat, step, self.flats, given, known, self.guarded[flat.path])
        if not is_training(step):
            return task
        nodes = step.distribution.nodes if step.distribution else 1
        if nodes > 1:
            task["env"] = {**network(self._machine(step)), **task["env"]}
        return task | {"training": {"nodes": nodes, "ranks_per_node": max(1, gpus_of(step)[1])}}

    def _keep(self, task: Mapping[str, Any]) -> str:
        """Keep the bundle of a task; where it belongs."""
        files = packed(_ENTRY, task, RENDEZVOUS if "training" in task else ())
        self.bundles |= files
        return f"{self.root}/{next(iter(files)).rpartition('/')[0]}"

    def _environment(self, flat: Flat, step: Step) -> dict[str, Any]:
        """The parameters that the step reads, and the names of secrets, never their values."""
        given = self.given(flat).values()
        found: dict[str, Any] = {name: joined({"Get": value}, on="") for name, _, value in given}
        if gets_secrets(step, self.place):
            found |= {f"REKINDLE_SECRET_{n}": arn for n, arn in sorted(self.place.secrets.items())}
        return found

    def _machine(self, step: Step) -> str:
        try:
            return machine_for("sagemaker", step, self.place.machine)
        except UnsupportedError as error:
            self.problems += error.problems
            return self.place.machine

    def _count(self, flat: Flat, what: str, found: int, most: int) -> None:
        if found > most:
            lists = ("ProcessingInputs", "ProcessingOutputConfig.Outputs", "InputDataConfig")
            self.counted |= {f"{flat.path}.{name}" for name in lists}
            kind = "Training" if is_training(flat.step) else "Processing"
            how = f"it has {found} {what}, a {kind} job takes {most}"
            self.beyond(flat.path, flat.step.where, how, "join some of them in one artifact")

    def beyond(self, path: str, where: str, how: str, fix: str) -> None:
        """Note what is more than the service takes."""
        self.problems.append(beyond("sagemaker", path, where, how, fix))
