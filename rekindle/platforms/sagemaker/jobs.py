"""The jobs of one compilation for SageMaker: what they are called, where their inputs and
outputs lie, and the job that each step becomes with its bundle: a Processing job on one
CPU machine, or a Training job on several machines or on GPUs.

A Training job has no property files, so a condition on what it returned reads those of a
small Processing job that repeats its result. Every request is held against the service's
own shapes and limits, since no SDK does. Debugger has been closed to new customers since
2026-07-30 and Profiler ends in 2027, so neither is asked for. Authority: botocore's model
of CreateProcessingJob and CreateTrainingJob."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.catalog.tables import network
from rekindle.errors import Problem, UnsupportedError
from rekindle.ir.flatten import Flat, Given, Guard, Output, sources
from rekindle.ir.graph import Importer, Step
from rekindle.platforms import bundle
from rekindle.platforms.bundle import RENDEZVOUS, RESULT, channels_of, packed, task_of
from rekindle.platforms.feature_checks import beyond, python_problems
from rekindle.platforms.machines import gpus_of, machine_for
from rekindle.platforms.sagemaker import shapes
from rekindle.platforms.sagemaker.job_requests import (
    Request,
    RuntimeText,
    processing_job,
    training_job,
)
from rekindle.platforms.sagemaker.limits import ECR, limits
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import plain_name

_ILLEGAL = r"[^A-Za-z0-9_-]+"
_DAY_SECONDS = 86_400
_ENTRY = Path(__file__).with_name("entry.py")
# the members of requests that a problem about the number of inputs or outputs is about
_COUNTED_MEMBERS = (
    "ProcessingInputs",
    "ProcessingOutputConfig.Outputs",
    "InputDataConfig",
)


def image_of(step: Step, place: SageMakerSpec) -> str:
    """The image that a step runs in: its own, where the service can pull it."""
    # a job pulls from ECR alone; the code of a Python component runs in our image, too
    image = bundle.image_of(step, place.image)
    if step.container.source and not ECR.fullmatch(image):
        return place.image or image
    return image


def gets_secrets(step: Step, place: SageMakerSpec) -> bool:
    """Whether the step finds `platforms.sagemaker.secrets` in its environment."""
    return bool(place.secrets) and image_of(step, place) == place.image


def joined(*parts: RuntimeText, on: str = "/") -> Request:
    """Text that the service puts together when the pipeline runs."""
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


class EnvironmentParameter(NamedTuple):
    """A parameter of the pipeline that a step reads from its environment: the `variable`,
    the parameter's `type` in the IR, and the definition's `reference` to its value."""

    variable: str
    type: str
    reference: str


class Jobs:
    """Builds the jobs of one compilation; collects their bundles, and the problems found.
    `guarded` are conditions that a step looks at itself, `fixed` parameters that a run
    cannot change."""

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
        self.place = place
        self.flats = flats
        self.guarded = guarded
        self.names = names
        self.types = types
        self.values = values
        self.fixed = fixed
        self.problems: list[Problem] = []
        self.bundles: dict[str, bytes] = {}
        # members of requests whose length is a problem already, not to be reported twice
        self.counted: set[str] = set()

    @property
    def root(self) -> str:
        """The artifact root without a slash at its end."""
        return self.place.artifact_root.rstrip("/")

    def environment_parameters(self, flat: Flat) -> dict[str, EnvironmentParameter]:
        """The pipeline's parameters that the step reads from its environment, by name."""
        read_values = list(flat.parameters.values())
        for guard in self.guarded[flat.path]:
            read_values += guard.values.values()
        parameters: dict[str, EnvironmentParameter] = {}
        for value in read_values:
            for source in sources(value):
                if not isinstance(source, Given) or source.name in parameters:
                    continue
                if source.name in self.values and source.name not in self.fixed:
                    parameters[source.name] = EnvironmentParameter(
                        variable=f"REKINDLE_P{len(parameters)}",
                        type=self.types[source.name],
                        reference=f"Parameters.{source.name}",
                    )
        return parameters

    def uri(self, source: Output) -> RuntimeText:
        """Where an output lies, as a property of its job;
        a Training job's is within its model."""
        producer = self.flats[source.path].step
        name = self.names[source.path]
        if isinstance(producer, Importer):
            return producer.uri.literal or ""
        if is_training(producer):
            folder: Request = {"Get": f"Steps.{name}.OutputDataConfig.S3OutputPath"}
            job: Request = {"Get": f"Steps.{name}.TrainingJobName"}
            return joined(folder, job, "output/model", source.name)
        outputs = f"Steps.{name}.ProcessingOutputConfig.Outputs"
        return {"Get": f"{outputs}['{source.name}'].S3Output.S3Uri"}

    def folder(self, job: str, *names: str) -> Request:
        """The folder of this execution that a job writes to, or one inside of it."""
        execution: Request = {"Get": "Execution.PipelineExecutionId"}
        return joined(f"{self.root}/runs", execution, job, *names)

    def job_of(self, flat: Flat) -> tuple[str, Request]:
        """The type of the step that runs the job, and its arguments."""
        step = flat.step
        assert isinstance(step, Step)
        image = image_of(step, self.place)
        # those of Python components give way to the config's, which is looked at on its own
        if not step.container.source and not ECR.fullmatch(image):
            how = f"its image {image} is not in ECR, and a job pulls from nowhere else"
            fix = "copy it to ECR, and name that: NUMBER.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
            self.refuse(step.path, step.where, how, fix)
        self.problems += python_problems("sagemaker", step, image)
        if is_training(step):
            kind = "Training"
            request = self._training(flat, step)
        else:
            kind = "Processing"
            request = self._processing(flat, step)
        environment = self._environment(flat, step)
        if environment:
            request["Environment"] = environment
        return kind, self._finished(kind, request, flat.path)

    def result_copy(self, flat: Flat, name: str) -> Request:
        """The arguments of a Processing job, the step `name`, that repeats what a step's
        Training job returned."""
        assert isinstance(flat.step, Step)
        inputs: dict[str, RuntimeText] = {"bundle": self._add_bundle({"copies": "result-0"})}
        inputs["result-0"] = self.uri(Output(flat.path, RESULT))
        request = processing_job(
            self.place,
            image=self.place.image or image_of(flat.step, self.place),
            machine=self.place.machine,
            inputs=inputs,
            outputs={RESULT: self.folder(name, RESULT)},
            seconds=_DAY_SECONDS,
        )
        return self._finished("Processing", request, flat.path)

    def refuse(self, path: str, where: str, how: str, fix: str) -> None:
        """Note what is more than the service takes;
        `path` is a step's, or "" for the pipeline."""
        self.problems.append(beyond("sagemaker", path, where, how, fix))

    def _finished(self, kind: str, request: Request, path: str) -> Request:
        """The request with its role and tags, held against the service's shapes."""
        tags = self.place.tags
        request["RoleArn"] = self.place.role_arn
        if tags:
            request["Tags"] = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
        name_member = frozenset({f"{kind}JobName"})  # the service gives it
        for problem in shapes.misfits(f"Create{kind}JobRequest", request, path, name_member):
            if problem.where not in self.counted:
                self.problems.append(problem)
        return request

    def _processing(self, flat: Flat, step: Step) -> Request:
        """A job on one machine."""
        job = self.names[flat.path]
        outputs = {name: self.folder(job, name) for name in (RESULT, *step.outputs.artifacts)}
        most = limits()["processing_outputs"]
        self._check_count(flat, "outputs, its result included", len(outputs), most)
        return processing_job(
            self.place,
            image=image_of(step, self.place),
            machine=self._machine(step),
            inputs=self._inputs(flat, step, "processing"),
            outputs=outputs,
            seconds=step.timeout_seconds or _DAY_SECONDS,
        )

    def _training(self, flat: Flat, step: Step) -> Request:
        """A job that may run on several machines;
        on spot machines it may also wait for them."""
        seconds, wait_seconds = self._time_limits(flat, step)
        return training_job(
            self.place,
            image=image_of(step, self.place),
            machine=self._machine(step),
            count=_nodes_of(step),
            inputs=self._inputs(flat, step, "training"),
            folder=self.folder(self.names[flat.path]),
            seconds=seconds,
            wait_seconds=wait_seconds,
        )

    def _time_limits(self, flat: Flat, step: Step) -> tuple[float, float | None]:
        """Seconds that the job may run, and on spot machines those that it may wait and
        run."""
        most = limits()["training_days"] * _DAY_SECONDS
        seconds = step.time_limit_seconds or _DAY_SECONDS
        if seconds > most:
            message = (
                f"`{flat.path}` may run {seconds / 3_600:g} hours, "
                f"a Training job runs {most / 3_600:g} at most"
            )
            fix = "give less max_run_hours; the next run resumes"
            self.problems.append(Problem(message, step.where, fix))
        if step.distribution is None or not step.distribution.spot:
            return seconds, None
        patience_seconds = seconds + self.place.spot_wait_hours * 3_600
        # the service refuses to wait for less than the job may run
        return seconds, max(seconds, min(patience_seconds, most))

    def _inputs(self, flat: Flat, step: Step, kind: str) -> dict[str, RuntimeText]:
        """What the job reads: S3 URIs by channel, its bundle among them."""
        channels = channels_of(flat, self.guarded[flat.path])
        for source in channels.values():
            importer = self.flats[source.path].step
            if isinstance(importer, Importer) and not _is_in_s3(self.uri(source)):
                uri = importer.uri.literal or "what a parameter says"
                self.problems.append(_not_in_s3(importer, uri))
        inputs: dict[str, RuntimeText] = {"bundle": self._add_bundle(self._task(flat, step))}
        for channel, source in channels.items():
            inputs[channel] = self.uri(source)
        counted = "inputs, its bundle and results included"
        self._check_count(flat, counted, len(inputs), limits()[f"{kind}_inputs"])
        return inputs

    def _task(self, flat: Flat, step: Step) -> dict[str, Any]:
        """The task.json of the step, as entry.py reads it."""
        environment = {
            name: (parameter.variable, parameter.type)
            for name, parameter in self.environment_parameters(flat).items()
        }
        fixed_values = {name: self.values[name] for name in self.fixed}
        guards = self.guarded[flat.path]
        task = task_of(flat, step, self.flats, environment, fixed_values, guards)
        if not is_training(step):
            return task
        nodes = _nodes_of(step)
        if nodes > 1:
            task["env"] = {**network(self._machine(step)), **task["env"]}
        task["training"] = {"nodes": nodes, "ranks_per_node": max(1, gpus_of(step)[1])}
        return task

    def _add_bundle(self, task: Mapping[str, Any]) -> str:
        """Add the bundle of a task to `bundles`, and return its URI."""
        modules = RENDEZVOUS if "training" in task else ()
        files = packed(_ENTRY, task, modules)
        self.bundles |= files
        folder = next(iter(files)).rpartition("/")[0]
        return f"{self.root}/{folder}"

    def _environment(self, flat: Flat, step: Step) -> Request:
        """The parameters that the step reads, and the names of secrets, never their
        values."""
        environment: Request = {}
        for parameter in self.environment_parameters(flat).values():
            environment[parameter.variable] = joined({"Get": parameter.reference}, on="")
        if gets_secrets(step, self.place):
            for name, arn in sorted(self.place.secrets.items()):
                environment[f"REKINDLE_SECRET_{name}"] = arn
        return environment

    def _machine(self, step: Step) -> str:
        try:
            return machine_for("sagemaker", limits(), step, self.place.machine)
        except UnsupportedError as error:
            self.problems += error.problems
            return self.place.machine

    def _check_count(self, flat: Flat, counted: str, count: int, most: int) -> None:
        """Refuse more inputs or outputs than a job takes."""
        if count > most:
            self.counted |= {f"{flat.path}.{member}" for member in _COUNTED_MEMBERS}
            kind = "Training" if is_training(flat.step) else "Processing"
            how = f"it has {count} {counted}, a {kind} job takes {most}"
            self.refuse(flat.path, flat.step.where, how, "join some of them in one artifact")


def _nodes_of(step: Step) -> int:
    return step.distribution.nodes if step.distribution else 1


def _is_in_s3(uri: RuntimeText) -> bool:
    return isinstance(uri, str) and uri.startswith("s3://")


def _not_in_s3(importer: Importer, uri: str) -> Problem:
    return Problem(
        f"`{importer.path}` imports {uri}, and SageMaker mounts what lies in S3",
        importer.where,
        "copy it to S3, and import it from there",
    )
