"""What a pipeline asks of a platform: the features of KFP that it uses, each with its place in the
IR.

The names are those of the rows of `catalog/features.yaml`, which says of each platform whether it
carries the feature natively, whether rekindle emulates it there, or why it is refused."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rekindle.ir import graph as ir
from rekindle.ir.origin import Origin, known_inputs, known_values, loop_origins
from rekindle.ir.placeholders import PLATFORM_FACTS, Argument, Reference, references, templates


@dataclasses.dataclass(frozen=True)
class Use:
    """A feature, who uses it (the path of a node; "" = the pipeline), and its place in the IR."""

    feature: str
    path: str
    where: str


def uses(graph: ir.Graph, arguments: Mapping[str, Any] | None = None) -> tuple[Use, ...]:
    """Everything that the pipeline uses, each once, in the order of its nodes. The `arguments`
    of a run decide what importers import whose URI is an input, and leave out settings whose
    inputs have no value."""
    found = [Use(_named(s), "", s.where) for s in graph.settings]
    for name, parameter in graph.inputs.parameters.items():
        where = f"root.inputDefinitions.parameters.{name}.defaultValue"
        facts = (f for f in PLATFORM_FACTS if f"{{{{$.{f}}}}}" in str(parameter.default))
        found += [Use(_of_fact(fact), "", where) for fact in facts]
    if any(not artifact.optional for artifact in graph.inputs.artifacts.values()):
        found.append(Use("artifact_arguments", "", "root.inputDefinitions.artifacts"))
    loops = loop_origins(graph)
    known = {} if arguments is None else known_inputs(graph, arguments)
    for node in graph.nodes():
        match node:
            case ir.Step():
                around = node.path.rpartition("/")[0]
                own = [*_of_step(_settled(node, known[around]) if known else node)]
            case ir.Importer():
                asked = [_importer(node), *["workspace"] * node.to_workspace]
                if known and asked[0] == "importers_at_run_time":
                    asked += _imports(node, known)
                own = [(feature, node.where) for feature in asked]
            case ir.SubDag():
                own = [*_of_sub_dag(node, loops)]
        found += [Use(feature, node.path, where) for feature, where in (*_of_any(node), *own)]
    return tuple(dict.fromkeys(found))


def _importer(node: ir.Importer) -> str:
    """By where it imports from: a platform mounts its own store only."""
    uri = node.uri.literal
    if uri is None or any(True for _ in templates(dict(node.metadata))):
        return "importers_at_run_time"
    return _of_uri(uri)


def _of_uri(uri: str) -> str:
    scheme = uri.partition("://")[0]
    return f"importers_{scheme}" if scheme in ("gs", "s3") else "importers"


def _imports(node: ir.Importer, known: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What an importer that waits for values imports, as far as the scheme is known."""
    values, text = known_values(node, known), ""
    for part in node.uri.parts:
        if isinstance(part, Reference):
            value = values.get(part.path[2]) if part.path[0] == "inputs" else None
            if value is None and "://" not in text:
                return
            if value is None:
                break
            part = str(value)
        text += part
    yield _of_uri(text)


def _settled(step: ir.Step, known: Mapping[str, Any]) -> ir.Step:
    """The step without what hangs on inputs that have no value, which KFP leaves out as well."""

    def is_absent(value: Any) -> bool:
        if isinstance(value, Mapping):
            name = value.get("componentInputParameter")
            bound = isinstance(name, str) and known.get(name, "") is None
            return bound or any(map(is_absent, value.values()))
        return False

    def is_wanted(value: Any) -> bool:
        several = value if isinstance(value, list) else [value]
        return not several or not all(map(is_absent, several))

    return dataclasses.replace(
        step,
        settings=tuple(setting for setting in step.settings if is_wanted(setting.value)),
        secrets=tuple(
            s
            for s in step.secrets
            if not isinstance(s.name, ir.FromInput) or known.get(s.name.name, "") is not None
        ),
    )


def _of_any(node: ir.Node) -> Iterator[tuple[str, str]]:
    bindings = [*node.parameters.values(), *node.artifacts.values()]
    if node.condition is not None:
        yield "conditions", f"{node.where}.triggerPolicy.condition"
    if node.always:
        watched = any(isinstance(b, ir.FinalStatus) for b in bindings)
        exits = watched or any(name.startswith("exit-handler-") for name in node.after)
        yield "exit_handlers" if exits else "ignore_upstream_failure", node.where
    if any(isinstance(b, ir.FinalStatus) for b in bindings):
        yield "final_status", f"{node.where}.inputs"
    if any(isinstance(b, ir.FromInput | ir.FromTask) and b.keys for b in bindings):
        yield "struct_elements", f"{node.where}.inputs"
    artifacts = [*node.inputs.artifacts.values(), *node.outputs.artifacts.values()]
    if any(artifact.is_list for artifact in artifacts):
        yield "artifact_lists", node.where
    # the defaults of inputs that are not given at run time, and what is given with Templates in it
    ports = node.inputs.parameters.items()
    written = [port.default for name, port in ports if name not in node.parameters]
    written += [b.value for b in node.parameters.values() if isinstance(b, ir.Formatted)]
    yield from ((_of_fact(fact), f"{node.where}.inputs") for fact in _facts(templates(written)))
    if any(parameter.type == "TASK_CONFIG" for parameter in node.inputs.parameters.values()):
        yield "task_config", f"{node.where}.inputs"


def _facts(arguments: Iterable[Argument]) -> Iterator[str]:
    """Facts of the run that only some platforms have, as far as `arguments` ask for them."""
    for path in (path for argument in arguments for path in references(argument)):
        if path[0] == "run" and path[1] in PLATFORM_FACTS:
            yield path[1]


def _of_fact(fact: str) -> str:
    return "workspace" if fact == "workspace_path" else "vertex_facts"


def _of_sub_dag(node: ir.SubDag, loops: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    results = [*node.dag.parameters.values(), *node.dag.artifacts.values()]
    if any(len(sources) > 1 for sources in results):
        yield "one_of", node.where
    if node.condition is not None and results:
        yield "branch_outputs", node.where
    if node.retry.count:
        yield "retries_of_nested", f"{node.where}.retryPolicy"
    if node.loop is None:
        if node.condition is None and not node.name.startswith(("exit-handler-", "condition-")):
            yield "nesting", node.where
        return
    over = loops[node.path]
    if over is None:
        yield "loops_over_outputs", node.where
    else:
        yield "loops_over_arguments" if over else "loops", node.where
    if node.loop.at_once:
        yield "loop_limits", f"{node.where}.iteratorPolicy"
    if results:
        yield "collected", node.where


def _of_step(step: ir.Step) -> Iterator[tuple[str, str]]:
    container, spread = step.container, step.distribution
    if container.image.startswith(_STUBS):
        yield "cluster_steps", step.where
    elif not container.source and not container.command:
        yield "image_entry_points", step.where
    else:
        yield "python_components" if container.source else "container_components", step.where
    asked = {
        "retries": step.retry.count,
        "retries_of_distributed": step.retry.count and spread,
        "caching": step.cache,
        "cache_keys": step.cache_key,
        "timeouts": step.timeout_seconds is not None,
        "distribution": spread,
        "accelerators": spread and spread.gpus_per_node,
        "machines": spread and spread.machine,
        "spot": spread and spread.spot,
    }
    features = [feature for feature, there in asked.items() if there]
    yield from ((feature, step.where) for feature in (*features, *_of_container(container)))
    if step.secrets:
        yield "secrets", step.secrets[0].where
    yield from ((_named(setting), setting.where) for setting in step.settings)


_STUBS = "argostub/"  # kfp-kubernetes: what KFP's driver does itself in place of a container


def _of_container(container: ir.Container) -> Iterator[str]:
    resources = container.resources
    if container.requirements:
        yield "pip_preambles"
    if "{{$" in container.image:
        yield "images_at_run_time"
    cpu = resources.cpu_limit or resources.cpu_request
    if cpu or resources.memory_limit or resources.memory_request:
        yield "cpu_and_memory"
    if (name := resources.accelerator_type) == "nvidia.com/gpu":
        yield "cluster_accelerators"
    elif name:  # a placeholder's value is not known here
        other = "{{$" not in name and _OTHER_ACCELERATORS.search(name)
        yield "other_accelerators" if other else "accelerators"
    if resources.at_run_time:
        yield "resources_at_run_time"
    yield from map(_of_fact, _facts((*container.command, *container.args, *container.env.values())))


# AMD, TPUs, slices of a GPU, and GPUs that the clouds have given up
_OTHER_ACCELERATORS = re.compile(r"/|(?:^|[-_])(?:tpu|(?:k80|p100|p4)$)", re.IGNORECASE)


def _named(setting: ir.Setting) -> str:
    """KFP's own name, where it says enough."""
    return "task_config" if setting.name == "taskConfigPassthroughs" else setting.name
