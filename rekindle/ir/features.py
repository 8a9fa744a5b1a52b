"""What a pipeline asks of a platform: the features of KFP that it uses, each with its
place in the IR.

The names are those of the rows of `catalog/features.yaml`, and of `catalog/dataflow.yaml`
for what dataflow.py finds. A platform's own
`features.yaml` says whether the platform carries a feature natively, whether rekindle
emulates it there, or why it is refused; platforms/feature_checks.py compares the two."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rekindle.ir import graph as ir
from rekindle.ir.dataflow import features_of_values, is_exit_task
from rekindle.ir.origin import Origin, known_inputs, known_values, loop_origins
from rekindle.ir.placeholders import (
    PLATFORM_FACTS,
    Argument,
    has_templates,
    references,
    templates,
)
from rekindle.ir.scopes import Scope, scopes

# The image of steps that KFP's driver does itself on its cluster (kfp-kubernetes)
_STUBS = "argostub/"
# AMD, TPUs, slices of a GPU, and GPUs that the clouds have given up
_OTHER_ACCELERATORS = re.compile(r"/|(?:^|[-_])(?:tpu|(?:k80|p100|p4)$)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Use:
    """A feature that a node or the pipeline uses."""

    feature: str
    """Its row in `catalog/features.yaml`."""
    path: str
    """The node that uses it; "" for the pipeline itself."""
    where: str
    """Its place in the IR."""


def uses(graph: ir.Graph, arguments: Mapping[str, Any] | None = None) -> tuple[Use, ...]:
    """Every use of a feature in the pipeline, each once, in the order of its nodes.

    With the `arguments` of a run more is known: the URI of an importer that reads it from
    an input, and which settings do not count, because the inputs that they read have no
    value."""
    all_uses = [Use(_feature_of_setting(setting), "", setting.where) for setting in graph.settings]
    for name, parameter in graph.inputs.parameters.items():
        where = f"root.inputDefinitions.parameters.{name}.defaultValue"
        default = str(parameter.default)
        facts = [fact for fact in PLATFORM_FACTS if f"{{{{$.{fact}}}}}" in default]
        all_uses += [Use(_feature_of_fact(fact), "", where) for fact in facts]
    if any(not artifact.optional for artifact in graph.inputs.artifacts.values()):
        all_uses.append(Use("artifact_arguments", "", "root.inputDefinitions.artifacts"))
    loops = loop_origins(graph)
    # without arguments nothing is known of any Dag's inputs
    inputs_of_dags = {} if arguments is None else known_inputs(graph, arguments)
    for node, scope in scopes(graph, inputs_of_dags):
        features = [*_features_of_node(node), *features_of_values(node, scope, loops)]
        match node:
            case ir.Step():
                if inputs_of_dags:
                    node = _without_absent(node, inputs_of_dags[node.path.rpartition("/")[0]])
                features += _features_of_step(node)
            case ir.Importer():
                features += _features_of_importer(node, inputs_of_dags, scope)
            case ir.SubDag():
                features += _features_of_sub_dag(node, loops)
        all_uses += [Use(feature, node.path, where) for feature, where in features]
    return tuple(dict.fromkeys(all_uses))


def _features_of_importer(
    node: ir.Importer, inputs_of_dags: Mapping[str, Mapping[str, Any]], scope: Scope
) -> Iterator[tuple[str, str]]:
    """The features of an importer, by the store of its URI: a platform mounts its own only."""
    uri = node.uri.literal
    is_open = uri is None or has_templates(dict(node.metadata))  # until the run
    if is_open:
        yield "importers_at_run_time", node.where
    elif uri:  # an empty one stands in a branch that is not taken
        yield _feature_of_uri(node, uri), node.where
    if node.to_workspace:
        yield "workspace", node.where
    if is_open and inputs_of_dags:
        known_uri = _known_uri(node, inputs_of_dags)
        if known_uri:
            yield _feature_of_uri(node, known_uri), node.where
    for uri in _uris_of_turns(node, scope):
        yield _feature_of_uri(node, uri), node.where


def _uris_of_turns(node: ir.Importer, scope: Scope) -> Iterator[str]:
    """The URIs of an importer in a loop over a list that is written in it."""
    for binding in node.parameters.values():
        if isinstance(binding, ir.FromInput) and not binding.keys:
            for item in scope.items.get(binding.name, ()):
                if isinstance(item, str) and "://" in item:
                    yield item


def _feature_of_uri(node: ir.Importer, uri: str) -> str:
    scheme = uri.partition("://")[0]
    if scheme in ("gs", "s3", "minio"):
        return f"importers_{scheme}"
    artifact_types = {artifact.schema_title for artifact in node.outputs.artifacts.values()}
    if any(artifact_type.startswith("google.") for artifact_type in artifact_types):
        return "importers_google"
    if scheme == "oci" and artifact_types == {"system.Model"}:
        return "importers_oci"
    return "importers"


def _known_uri(node: ir.Importer, inputs_of_dags: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The URI of an importer as far as `inputs_of_dags` tell it, which is enough for its
    scheme; None where a value is missing before that."""
    values = known_values(node, inputs_of_dags)
    text = ""
    for part in node.uri.parts:
        if isinstance(part, str):
            text += part
            continue
        value = values.get(part.path[2]) if part.path[0] == "inputs" else None
        if value is None:
            return text if "://" in text else None
        text += str(value)
    return text


def _without_absent(step: ir.Step, inputs: Mapping[str, Any]) -> ir.Step:
    """The step without the settings and secrets whose inputs have no value.

    KFP leaves them out, too. `inputs` are the known ones of the Dag around the step."""

    def has_no_value(name: object) -> bool:
        # an input that is missing here is not known yet, and may have a value
        return isinstance(name, str) and name in inputs and inputs[name] is None

    def is_absent(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        if has_no_value(value.get("componentInputParameter")):
            return True
        return any(is_absent(inner) for inner in value.values())

    def is_wanted(value: Any) -> bool:
        if isinstance(value, list) and value:
            return not all(is_absent(item) for item in value)
        return not is_absent(value)

    def has_name(secret: ir.Secret) -> bool:
        return not (isinstance(secret.name, ir.FromInput) and has_no_value(secret.name.name))

    return dataclasses.replace(
        step,
        settings=tuple(setting for setting in step.settings if is_wanted(setting.value)),
        secrets=tuple(secret for secret in step.secrets if has_name(secret)),
    )


def _features_of_node(node: ir.Node) -> Iterator[tuple[str, str]]:
    """The features that any kind of node may use, with their places."""
    bindings = [*node.parameters.values(), *node.artifacts.values()]
    if node.condition is not None:
        yield "conditions", f"{node.where}.triggerPolicy.condition"
    reads_status = any(isinstance(binding, ir.FinalStatus) for binding in bindings)
    if node.always:
        feature = "exit_handlers" if is_exit_task(node) else "ignore_upstream_failure"
        yield feature, node.where
    if reads_status:
        yield "final_status", f"{node.where}.inputs"
    if any(isinstance(b, ir.FromInput | ir.FromTask) and b.keys for b in bindings):
        yield "struct_elements", f"{node.where}.inputs"
    artifacts = [*node.inputs.artifacts.values(), *node.outputs.artifacts.values()]
    if any(artifact.is_list for artifact in artifacts):
        yield "artifact_lists", node.where
    for name, value in _written_values(node):
        for fact in _platform_facts(templates(value)):
            # KFP writes defaults of components of Google's that a pipeline never names
            yield _feature_of_fact(fact), f"{node.where}.inputs.parameters.{name}"
    if any(parameter.type == "TASK_CONFIG" for parameter in node.inputs.parameters.values()):
        yield "task_config", f"{node.where}.inputs"


def _written_values(node: ir.Node) -> Iterator[tuple[str, Any]]:
    """By input the defaults of those that are not given, and what is given with Templates
    in it."""
    for name, parameter in node.inputs.parameters.items():
        if name not in node.parameters:
            yield name, parameter.default
    for name, binding in node.parameters.items():
        if isinstance(binding, ir.Formatted):
            yield name, binding.value


def _platform_facts(arguments: Iterable[Argument]) -> Iterator[str]:
    """Facts of the run that only some platforms have, as far as `arguments` ask for them."""
    for argument in arguments:
        for path in references(argument):
            if path[0] == "run" and path[1] in PLATFORM_FACTS:
                yield path[1]


def _feature_of_fact(fact: str) -> str:
    return "workspace" if fact == "workspace_path" else "vertex_facts"


def _features_of_sub_dag(node: ir.SubDag, loops: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    """The features of nested pipelines, branches and loops, with their places."""
    results = [*node.dag.parameters.values(), *node.dag.artifacts.values()]
    if any(len(sources) > 1 for sources in results):
        yield "one_of", node.where
    if node.condition is not None and results:
        yield "branch_outputs", node.where
    if node.retry.count:
        yield "retries_of_nested", f"{node.where}.retryPolicy"
    if node.loop is None:
        # kfp makes Dags of these names around what an ExitHandler covers, and around an If
        # with its Elif and Else; any other is a pipeline of the user's
        if node.condition is None and not node.name.startswith(("exit-handler-", "condition-")):
            yield "nesting", node.where
        return
    origin = loops[node.path]
    if origin is None:
        yield "loops_over_outputs", node.where
    elif origin:
        yield "loops_over_arguments", node.where
    else:
        yield "loops", node.where
    if node.loop.at_once:
        yield "loop_limits", f"{node.where}.iteratorPolicy"
    if results:
        yield "collected", node.where


def _features_of_step(step: ir.Step) -> Iterator[tuple[str, str]]:
    """The features of a container, of how it is run, and those that only some platforms
    know, with their places."""
    container = step.container
    spread = step.distribution
    if container.image.startswith(_STUBS):
        yield "cluster_steps", step.where
    elif not container.source and not container.command:
        yield "image_entry_points", step.where
    elif container.source:
        yield "python_components", step.where
    else:
        yield "container_components", step.where
    # a feature is used where its value is true
    usage = {
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
    features = [feature for feature, used in usage.items() if used]
    for feature in (*features, *_features_of_container(container)):
        yield feature, step.where
    if step.secrets:
        yield "secrets", step.secrets[0].where
    for setting in step.settings:
        yield _feature_of_setting(setting), setting.where


def _features_of_container(container: ir.Container) -> Iterator[str]:
    resources = container.resources
    if container.requirements:
        yield "pip_preambles"
    if "{{$" in container.image:
        yield "images_at_run_time"
    cpu = resources.cpu_limit or resources.cpu_request
    if cpu or resources.memory_limit or resources.memory_request:
        yield "cpu_and_memory"
    accelerator = resources.accelerator_type
    if accelerator == "nvidia.com/gpu":
        yield "cluster_accelerators"
    # a placeholder's value is not known here
    elif "{{$" not in accelerator and _OTHER_ACCELERATORS.search(accelerator):
        yield "other_accelerators"
    elif accelerator:
        yield "accelerators"
    if resources.at_run_time:
        yield "resources_at_run_time"
    arguments = (*container.command, *container.args, *container.env.values())
    for fact in _platform_facts(arguments):
        yield _feature_of_fact(fact)


def _feature_of_setting(setting: ir.Setting) -> str:
    """The feature of a setting: KFP's own name of it, but for one that says too little."""
    return "task_config" if setting.name == "taskConfigPassthroughs" else setting.name
