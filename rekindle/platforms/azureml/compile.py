"""A pipeline for Azure Machine Learning: the YAML of a pipeline job, and the folders of code that
its steps run.

Pure and byte-stable. The Graph is flattened, because a pipeline job knows neither nested pipelines
nor loops. Each step is a command that runs `entry.py` of its bundle. Steps pass only files to each
other there: what a step returned is a file in its output `rekindle_result`. Conditions become
guards, which the step itself looks at. To wait for a step is to mount its result.

Authority: the schemas of azure-ai-ml 1.35, which load and validate what is written here. No
workspace has run it yet."""

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.catalog.tables import limits, network
from rekindle.errors import Problem, collected
from rekindle.ir.compile import DUMPER
from rekindle.ir.edit.rewrite import OWN_IMAGES
from rekindle.ir.flatten import Flat, Given, Output, flatten, read_by
from rekindle.ir.graph import Graph, Step
from rekindle.ir.values import bind
from rekindle.platforms import bundle
from rekindle.platforms.bundle import RENDEZVOUS, RESULT, image_of
from rekindle.platforms.feature_checks import beyond, known_secrets, lacks, python_problems, refusal
from rekindle.platforms.machines import gpus_of, machine_for
from rekindle.platforms.submission import Definition, problems_in, requests_in
from rekindle.spec.platforms import AzureMLSpec

_ENTRY = Path(__file__).with_name("entry.py")
_SECRETS = ("platforms/azureml/secrets.py", "http.py")
_IDENTITIES = {"managed": "managed", "user": "user_identity"}  # the job's names for them
_KINDS = {"NUMBER_INTEGER": "integer", "NUMBER_DOUBLE": "number", "BOOLEAN": "boolean"}
_OURS = re.compile(r"rekindle_result|(?:result|artifact|after)_\d+")
_problem, _request = problems_in(__file__), requests_in(__file__)


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: AzureMLSpec
) -> Definition:
    """`<pipeline>.azureml.yaml`, which `az ml job create --file` and the SDK take, and beside it
    `bundles/<hash>/...`, the code of its steps. RequestError with everything that is wrong."""
    known = known_secrets(graph, place.secrets, lambda step: _knows_secrets(step, place))
    wrong = lacks(graph, "azureml", _of_place(graph, place), known, arguments=arguments)
    compiler = _Compiler(graph, bind(graph, arguments), place)
    job = compiler.job()
    if problems := [*wrong, *compiler.problems]:
        raise refusal(problems)
    text = yaml.dump(job, Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=10_000)
    return Definition({f"{graph.name}.azureml.yaml": text.encode(), **compiler.bundles})


def _of_place(graph: Graph, place: AzureMLSpec) -> Iterator[Problem]:
    ours = [s.path for s in graph.steps() if s.container.image.startswith(OWN_IMAGES)]
    if ours and not place.image:
        yield _problem("no_image", name=ours[0])
    if place.image and "@sha256:" not in place.image:
        yield _problem("mutable_tag", name=place.image)
    if place.secrets and not place.image:
        yield _problem("unread_secrets")
    if not re.fullmatch(limits("azureml")["name"], graph.name):
        how = f"`{graph.name}` is not a name of a job there"
        yield beyond("azureml", "", "pipelineInfo.name", how, "use letters, digits, - and _")


class _Dumper(DUMPER):  # type: ignore[misc, valid-type]
    """Text of several lines as such."""


_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, "|" if "\n" in text else None)
)


class _Compiler:
    """One compilation: the flat steps, the names of their jobs, and the problems found so far."""

    def __init__(self, graph: Graph, values: Mapping[str, Any], place: AzureMLSpec) -> None:
        self.graph, self.values, self.place = graph, values, place
        self.problems: list[Problem] = []
        self.bundles: dict[str, bytes] = {}
        self.flats = {flat.path: flat for flat in flatten(graph, values)}
        self.types: dict[str, str] = {n: p.type for n, p in graph.inputs.parameters.items()}
        for name, value in values.items():
            if isinstance(value, float):  # as KFP, it may be a fraction for a whole number
                self.types[name] = "NUMBER_DOUBLE"
        self.jobs = identifiers(self.flats)
        self.names = identifiers(values)
        self.open = {name for name, value in values.items() if value != ""}  # no input is empty

    def job(self) -> dict[str, Any]:
        steps = [flat for flat in self.flats.values() if isinstance(flat.step, Step)]
        read = {s.name for flat in steps for s in read_by(flat) if isinstance(s, Given)}
        shown = [name for name in self.values if name in read & self.open]
        inputs = {self.names[name]: bundle.scalar(self.values[name]) for name in shown}
        return _request(
            "pipeline",
            name=self.graph.name,
            tags={"rekindle": "true", **self.place.tags},
            compute=f"azureml:{self.place.compute or 'serverless'}",
            inputs=inputs or None,
            jobs={self.jobs[flat.path]: self._command(flat) for flat in steps},
        )

    def _command(self, flat: Flat) -> dict[str, Any]:
        """One step: its component, and what is bound to it."""
        step = flat.step
        assert isinstance(step, Step)
        self.problems += python_problems("azureml", step, image_of(step, self.place.image))
        given, mounted = self._given(flat), self._mounted(flat)
        made = identifiers(step.outputs.artifacts)
        left = {RESULT.replace("-", "_"): RESULT, **{there: name for name, there in made.items()}}
        inputs = {name: {"type": _KINDS.get(kind, "string")} for name, kind in given.values()}
        inputs |= {name: {"type": "uri_folder"} for name in mounted}
        promised = {name: {"type": "uri_folder", "mode": "upload"} for name in left}
        spread = {"type": "pytorch", "process_count_per_instance": 1}  # which starts the ranks
        bound = {name: f"${{{{parent.inputs.{name}}}}}" for name, _ in given.values()}
        bound |= {name: self._reference(output) for name, (_, output) in mounted.items()}
        secrets: dict[str, str] | None = None
        if _knows_secrets(step, self.place):  # their addresses, never their values
            named = sorted(self.place.secrets.items())
            secrets = {f"REKINDLE_SECRET_{name}": url for name, url in named}
        return _request(
            "command",
            image=image_of(step, self.place.image),
            cached=step.cache,
            code=f"./{self._bundle(flat, step)}",
            inputs=inputs,
            promised=promised,
            shell=_shell(list(given.values()), mounted, left),
            variables=secrets,
            bound=bound,
            spread=spread if step.distribution else None,
            outputs=copy.deepcopy(promised),  # a YAML of one value twice has anchors
            identity=_IDENTITIES.get(self.place.identity or ""),
            **self._machine(step),
        )

    def _given(self, flat: Flat) -> dict[str, tuple[str, str]]:
        """The pipeline's parameters that the step or its guards read: input's name and type."""
        names = dict.fromkeys(s.name for s in read_by(flat) if isinstance(s, Given))
        return {n: (self.names[n], self.types[n]) for n in names if n in self.open}

    def _mounted(self, flat: Flat) -> dict[str, tuple[str, Output]]:
        """Channels by input, with what lies there; those only waited for come last."""
        channels = bundle.channels_of(flat, flat.guards)
        read = {output.path for output in channels.values()}
        waits = [p for p in flat.after if p not in read and isinstance(self.flats[p].step, Step)]
        channels |= {f"after-{i}": Output(path, RESULT) for i, path in enumerate(waits)}
        return {name.replace("-", "_"): (name, output) for name, output in channels.items()}

    def _reference(self, output: Output) -> str:
        producer = self.flats[output.path].step
        names = {RESULT: RESULT.replace("-", "_"), **identifiers(producer.outputs.artifacts)}
        return f"${{{{parent.jobs.{self.jobs[output.path]}.outputs.{names[output.name]}}}}}"

    def _bundle(self, flat: Flat, step: Step) -> str:
        known = {name: value for name, value in self.values.items() if name not in self.open}
        task = bundle.task_of(flat, step, self.flats, self._given(flat), known, flat.guards)
        more: tuple[str, ...] = ()
        if step.distribution is not None:
            more = RENDEZVOUS
            task["nodes"] = step.distribution.nodes
            if step.distribution.nodes > 1:
                machine = self._machine(step)["machine"] or ""
                task["env"] = {**network(machine), **task["env"]}
            task["ranks_per_node"] = max(1, gpus_of(step)[1])
        if _knows_secrets(step, self.place):
            more, task["secrets"] = (*more, *_SECRETS), sorted(self.place.secrets)
        files = bundle.packed(_ENTRY, task, more)
        self.bundles |= files
        return next(iter(files)).rpartition("/")[0]

    def _machine(self, step: Step) -> dict[str, Any]:
        """Where the step runs: on a cluster with a name, or on a machine that Azure finds."""
        wanted, gpus = step.distribution, gpus_of(step)[1]
        cluster = (self.place.gpu_compute or self.place.compute) if gpus else self.place.compute
        machine: str | None = None
        is_spot = wanted is not None and wanted.spot
        if not cluster:
            with collected(self.problems):
                machine = machine_for("azureml", step, self.place.machine)
        elif is_spot:
            self.problems.append(_problem("one_tier", step=step, cluster=cluster))
        limit = step.time_limit_seconds
        return {
            "compute": f"azureml:{cluster}" if cluster else None,
            "machine": machine,
            "tier": "spot" if is_spot else None,
            "memory": "16g" if gpus else None,
            "count": wanted.nodes if wanted else 1,
            "limit": None if limit is None else round(limit),
        }


def _knows_secrets(step: Step, place: AzureMLSpec) -> bool:
    """Whether its image is ours, which has what reads them."""
    return bool(place.secrets) and image_of(step, place.image) == place.image


def _shell(
    given: list[tuple[str, str]], mounted: Mapping[str, tuple[str, Output]], left: Mapping[str, str]
) -> str:
    """The command: values go through files, so that the shell reads nothing in them but the line
    that ends their here-document, which only the user who starts the job can write."""
    lines, words = [], ["exec python3 entry.py"]
    if given:
        lines.append("values=$(mktemp -d)")
        words.append('--values "$values"')
    for name, _ in given:
        end = f"REKINDLE_{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        lines += [f"cat > \"$values/{name}\" <<'{end}'", f"${{{{inputs.{name}}}}}", end]
    words += [f'--input {channel}="${{{{inputs.{n}}}}}"' for n, (channel, _) in mounted.items()]
    words += [f'--output {name}="${{{{outputs.{n}}}}}"' for n, name in left.items()]
    return "\n".join([*lines, " ".join(words)])


def identifiers(names: Mapping[str, Any]) -> dict[str, str]:
    """Names that Azure takes for steps, inputs and outputs, each once, and none of ours."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_").lower() or "x"
        plain = plain if plain[0].isalpha() else f"x{plain}"
        if len(plain) > 60 or plain in found.values() or _OURS.fullmatch(plain):
            plain = f"{plain[:50]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        found[name] = plain
    return found
