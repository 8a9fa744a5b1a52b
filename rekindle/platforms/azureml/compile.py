"""A pipeline for Azure Machine Learning: the YAML of a pipeline job, and the folders of
code that its steps run.

Pure and byte-stable. The Graph is flattened, because a pipeline job knows neither nested
pipelines nor loops. Each step is a command that runs `entry.py` of its bundle. Steps pass
only files to each other there: what a step returned is a file in its output
`rekindle_result`. Conditions become guards, which the step itself looks at. To wait for a
step is to mount its result.

Authority: the schemas of azure-ai-ml 1.35, which load and validate what is written here.
No workspace has run it yet."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.catalog.tables import network
from rekindle.errors import Problem, collected
from rekindle.ir.compile import DUMPER
from rekindle.ir.edit.rewrite import OWN_IMAGES
from rekindle.ir.flatten import Flat, Given, Output, flatten, read_by
from rekindle.ir.graph import Graph, Step
from rekindle.ir.values import bind
from rekindle.platforms import bundle
from rekindle.platforms.azureml.limits import limits
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.bundle import RENDEZVOUS, RESULT, image_of
from rekindle.platforms.feature_checks import (
    beyond,
    known_secrets,
    lacks,
    python_problems,
    refusal,
)
from rekindle.platforms.machines import gpus_of, machine_for
from rekindle.platforms.submission import Definition
from rekindle.protojson import Json

_ENTRY = Path(__file__).with_name("entry.py")
_SECRETS = ("platforms/azureml/secrets.py", "http.py")
_IDENTITIES = {"managed": "managed", "user": "user_identity"}  # the job's names for them
_KINDS = {"NUMBER_INTEGER": "integer", "NUMBER_DOUBLE": "number", "BOOLEAN": "boolean"}
_RESULT_OUTPUT = RESULT.replace("-", "_")  # an output's name takes no dash
# names of inputs and outputs that only this module gives
_RESERVED = re.compile(r"rekindle_result|(?:result|artifact|after)_\d+")


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: AzureMLSpec
) -> Definition:
    """`<pipeline>.azureml.yaml`, which `az ml job create --file` and the SDK take, and
    beside it `bundles/<hash>/...`, the code of its steps. RequestError with everything
    that is wrong."""
    known = known_secrets(graph, place.secrets, lambda step: _gets_secrets(step, place))
    place_problems = _problems_of_place(graph, place)
    problems = lacks(graph, "azureml", place_problems, known, arguments=arguments)
    builder = _JobBuilder(graph, bind(graph, arguments), place)
    job = builder.job()
    problems += builder.problems
    if problems:
        raise refusal(problems)
    text = yaml.dump(job, Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=10_000)
    return Definition({f"{graph.name}.azureml.yaml": text.encode(), **builder.bundles})


def _problems_of_place(graph: Graph, place: AzureMLSpec) -> Iterator[Problem]:
    """What is wrong with the config's section for this pipeline."""
    paths = [step.path for step in graph.steps() if step.container.image.startswith(OWN_IMAGES)]
    if paths and not place.image:
        yield Problem(
            f"`{paths[0]}` needs rekindle's image",
            "platforms.azureml.image",
            "name it as NAME.azurecr.io/NAME:TAG, then rekindle images build and push CONFIG",
        )
    if place.image and "@sha256:" not in place.image:
        yield Problem(
            f"`{place.image}` is a mutable tag",
            "platforms.azureml.image",
            "rekindle images push CONFIG notes its digest; or say NAME.azurecr.io/NAME@sha256:...",
        )
    if place.secrets and not place.image:
        yield Problem(
            "secrets reach the steps in rekindle's image, and there is none",
            "platforms.azureml.secrets",
            "name it in platforms.azureml.image, or take the secrets out",
        )
    if not re.fullmatch(limits()["name"], graph.name):
        how = f"`{graph.name}` is not a name of a job there"
        yield beyond("azureml", "", "pipelineInfo.name", how, "use letters, digits, - and _")


class _Dumper(DUMPER):  # type: ignore[misc, valid-type]
    """Writes text of several lines as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


@dataclasses.dataclass(frozen=True)
class _Machine:
    """Where a step runs: on the `cluster` with this name, or, where that is "", on a
    machine of this `size` that Azure finds; None where none is known that fits."""

    cluster: str
    size: str | None
    is_spot: bool
    has_gpus: bool


class _JobBuilder:
    """One compilation: the flat steps, the names of their jobs, and the problems found so
    far."""

    def __init__(self, graph: Graph, values: Mapping[str, Any], place: AzureMLSpec) -> None:
        self.graph = graph
        self.values = values
        self.place = place
        self.problems: list[Problem] = []
        self.bundles: dict[str, bytes] = {}
        self.flats = {flat.path: flat for flat in flatten(graph, values)}
        self.types: dict[str, str] = {}
        for name, parameter in graph.inputs.parameters.items():
            self.types[name] = parameter.type
        for name, value in values.items():
            if isinstance(value, float):  # as KFP, it may be a fraction for a whole number
                self.types[name] = "NUMBER_DOUBLE"
        self.jobs = identifiers(self.flats)
        self.names = identifiers(values)
        # parameters that are inputs of the job; an input cannot be empty text
        self.inputs = {name for name, value in values.items() if value != ""}

    def job(self) -> Json:
        """The pipeline job, as its schema has it."""
        steps = [flat for flat in self.flats.values() if isinstance(flat.step, Step)]
        jobs = {self.jobs[flat.path]: self._command(flat) for flat in steps}
        parameters_read: set[str] = set()
        for flat in steps:
            parameters_read.update(_parameters_read_by(flat))
        inputs = {}
        for name, value in self.values.items():
            if name in parameters_read and name in self.inputs:
                inputs[self.names[name]] = bundle.scalar(value)
        job: Json = {
            "$schema": "https://azuremlschemas.azureedge.net/latest/pipelineJob.schema.json",
            "type": "pipeline",
            "tags": {"rekindle": "true", **self.place.tags},
            "display_name": self.graph.name,
            "experiment_name": self.graph.name,
            "settings": {
                "default_compute": f"azureml:{self.place.compute or 'serverless'}",
                "continue_on_step_failure": False,
            },
            "jobs": jobs,
        }
        if inputs:
            job["inputs"] = inputs
        return job

    def _command(self, flat: Flat) -> Json:
        """One step: its component, what is bound to it, and where it runs."""
        step = flat.step
        assert isinstance(step, Step)
        self.problems += python_problems("azureml", step, image_of(step, self.place.image))
        machine = self._machine(step)
        command: Json = {
            "type": "command",
            "component": self._component(flat, step, machine),
            "inputs": self._bindings(flat),
            # not the component's own: YAML of one object in two places has anchors
            "outputs": _output_folders(_outputs_of(step)),
            "resources": {"instance_count": step.distribution.nodes if step.distribution else 1},
        }
        if machine.size is not None:
            command["resources"]["instance_type"] = machine.size
        if machine.has_gpus:
            command["resources"]["shm_size"] = "16g"
        if machine.cluster:
            command["compute"] = f"azureml:{machine.cluster}"
        if machine.is_spot:
            command["queue_settings"] = {"job_tier": "spot"}
        if step.time_limit_seconds is not None:
            command["limits"] = {"timeout": round(step.time_limit_seconds)}
        if self.place.identity:
            command["identity"] = {"type": _IDENTITIES[self.place.identity]}
        if _gets_secrets(step, self.place):
            # the addresses of secrets, never their values
            addresses = sorted(self.place.secrets.items())
            command["environment_variables"] = {
                f"REKINDLE_SECRET_{name}": url for name, url in addresses
            }
        return command

    def _component(self, flat: Flat, step: Step, machine: _Machine) -> Json:
        """What the step runs, and the types of what it reads and leaves."""
        parameters = self._step_parameters(flat)
        mounted = self._mounted(flat)
        outputs = _outputs_of(step)
        inputs = {name: {"type": _KINDS.get(kind, "string")} for name, kind in parameters.values()}
        inputs |= {name: {"type": "uri_folder"} for name in mounted}
        component = {
            "type": "command",
            "inputs": inputs,
            "outputs": _output_folders(outputs),
            "is_deterministic": step.cache,
            "code": f"./{self._bundle(flat, step, machine)}",
            "environment": {"image": image_of(step, self.place.image)},
            "command": _shell(list(parameters.values()), mounted, outputs),
        }
        if step.distribution:
            # one process a node, which starts the ranks
            component["distribution"] = {
                "type": "pytorch",
                "process_count_per_instance": 1,
            }
        return component

    def _bindings(self, flat: Flat) -> dict[str, str]:
        """The expression of what each input of a step gets."""
        bindings = {}
        for name, _ in self._step_parameters(flat).values():
            bindings[name] = f"${{{{parent.inputs.{name}}}}}"
        for name, (_, output) in self._mounted(flat).items():
            bindings[name] = self._reference(output)
        return bindings

    def _step_parameters(self, flat: Flat) -> dict[str, tuple[str, str]]:
        """The pipeline's parameters that the step or its guards read:
        input's name and type."""
        parameters = {}
        for name in _parameters_read_by(flat):
            if name in self.inputs:
                parameters[name] = (self.names[name], self.types[name])
        return parameters

    def _mounted(self, flat: Flat) -> dict[str, tuple[str, Output]]:
        """Channels by input, with what lies there; those only waited for come last."""
        channels = bundle.channels_of(flat, flat.guards)
        paths_read = {output.path for output in channels.values()}
        waits = [path for path in flat.after if isinstance(self.flats[path].step, Step)]
        # a job has no other order than what its steps read: to wait is to mount a result
        for number, path in enumerate(path for path in waits if path not in paths_read):
            channels[f"after-{number}"] = Output(path, RESULT)
        return {
            channel.replace("-", "_"): (channel, output) for channel, output in channels.items()
        }

    def _reference(self, output: Output) -> str:
        """The expression of an output of another step."""
        producer = self.flats[output.path].step
        names = {RESULT: _RESULT_OUTPUT, **identifiers(producer.outputs.artifacts)}
        return f"${{{{parent.jobs.{self.jobs[output.path]}.outputs.{names[output.name]}}}}}"

    def _bundle(self, flat: Flat, step: Step, machine: _Machine) -> str:
        """Add the bundle of a step to `bundles`, and return its folder."""
        constants = {n: value for n, value in self.values.items() if n not in self.inputs}
        parameters = self._step_parameters(flat)
        task = bundle.task_of(flat, step, self.flats, parameters, constants, flat.guards)
        modules: tuple[str, ...] = ()
        if step.distribution is not None:
            modules += RENDEZVOUS
            task["nodes"] = step.distribution.nodes
            if step.distribution.nodes > 1:
                task["env"] = {**network(machine.size or ""), **task["env"]}
            task["ranks_per_node"] = max(1, gpus_of(step)[1])
        if _gets_secrets(step, self.place):
            modules += _SECRETS
            task["secrets"] = sorted(self.place.secrets)
        files = bundle.packed(_ENTRY, task, modules)
        self.bundles |= files
        return next(iter(files)).rpartition("/")[0]

    def _machine(self, step: Step) -> _Machine:
        """Where the step runs; notes a problem where that is nowhere."""
        has_gpus = gpus_of(step)[1] > 0
        is_spot = step.distribution is not None and step.distribution.spot
        cluster = self.place.compute
        if has_gpus and self.place.gpu_compute:
            cluster = self.place.gpu_compute
        size: str | None = None
        if not cluster:
            with collected(self.problems):
                size = machine_for("azureml", limits(), step, self.place.machine)
        elif is_spot:
            problem = Problem(
                f"`{step.path}` wants spot machines, and the cluster `{cluster}` has one tier "
                "for all",
                step.where,
                "leave platforms.azureml.compute and gpu_compute empty, or make it a cluster of "
                "low priority and set spot: false",
            )
            self.problems.append(problem)
        return _Machine(cluster, size, is_spot, has_gpus)


def _parameters_read_by(flat: Flat) -> Iterable[str]:
    """The names of the pipeline's parameters that a step or its guards read, each
    once."""
    names = [source.name for source in read_by(flat) if isinstance(source, Given)]
    return dict.fromkeys(names)


def _outputs_of(step: Step) -> dict[str, str]:
    """What a step leaves, by the names that Azure takes."""
    artifacts = identifiers(step.outputs.artifacts)
    return {_RESULT_OUTPUT: RESULT, **{azure: name for name, azure in artifacts.items()}}


def _output_folders(names: Iterable[str]) -> dict[str, dict[str, str]]:
    return {name: {"type": "uri_folder", "mode": "upload"} for name in names}


def _gets_secrets(step: Step, place: AzureMLSpec) -> bool:
    """Whether its image is ours, which has what reads secrets."""
    return bool(place.secrets) and image_of(step, place.image) == place.image


def _shell(
    parameters: list[tuple[str, str]],
    mounted: Mapping[str, tuple[str, Output]],
    outputs: Mapping[str, str],
) -> str:
    """The command: values go through files, so that the shell reads nothing in them but
    the line that ends their here-document, which only the user who starts the job can
    write."""
    lines = []
    words = ["exec python3 entry.py"]
    if parameters:
        lines.append("values=$(mktemp -d)")
        words.append('--values "$values"')
    for name, _ in parameters:
        end = f"REKINDLE_{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        lines += [f"cat > \"$values/{name}\" <<'{end}'", f"${{{{inputs.{name}}}}}", end]
    for name, (channel, _) in mounted.items():
        words.append(f'--input {channel}="${{{{inputs.{name}}}}}"')
    for name, output in outputs.items():
        words.append(f'--output {output}="${{{{outputs.{name}}}}}"')
    return "\n".join([*lines, " ".join(words)])


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Names that Azure takes for steps, inputs and outputs, each once, and none of
    ours."""
    identifiers: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_").lower() or "x"
        if not plain[0].isalpha():
            plain = f"x{plain}"
        is_taken = plain in identifiers.values() or _RESERVED.fullmatch(plain)
        if is_taken or len(plain) > 60:
            plain = f"{plain[:50]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        identifiers[name] = plain
    return identifiers
