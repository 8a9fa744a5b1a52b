"""A spec's pipeline as one platform's Definition; sends nothing."""

import glob
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

from rekindle.app.pipeline import ON_MACHINES, ON_PIECES, CompiledPipeline, arguments_of
from rekindle.app.plan import settled
from rekindle.catalog.tables import feature_rows
from rekindle.errors import Problem, RequestError, collected
from rekindle.ir.distribution import Distribution
from rekindle.ir.features import uses
from rekindle.ir.graph import Graph
from rekindle.platforms import user_code
from rekindle.platforms.api import platform_of
from rekindle.platforms.submission import Definition
from rekindle.spec.model import ResourcesSpec, Spec

log = logging.getLogger(__name__)

_CHECKPOINT = "artifact_root"  # the components' input that says where they save and resume


def compiled(platform: str, spec: Spec, pipeline: CompiledPipeline) -> Definition:
    """The definition for one platform; RequestError with everything that is wrong."""
    problems = list(_problems_of_the_shipped_pipeline(platform, spec))
    target = platform_of(platform, spec.platforms)
    graph = pipeline.graph
    # each block on its own: what is wrong in one does not hide what is wrong in the next
    with collected(problems):
        spec = settled(spec, platform)
    with collected(problems):
        # refuses an image that was built from other files than those here
        code = user_code.code_of(spec, graph)
        problems += user_code.problems(platform, spec, graph, code)
        spec = user_code.placed(spec, code)
    with collected(problems):
        graph = spread(spec, graph)
    with collected(problems):
        arguments = arguments_of(spec, graph, target.settings.artifact_root, platform)
        definition = target.compile(pipeline.text, graph, arguments)
    if problems:
        raise RequestError(dict.fromkeys(problems))
    _warn_of_containers(platform, graph)
    _warn_of_local_paths(platform, spec)
    image = target.settings.image
    if image and "@" not in image:
        log.warning("%s is a mutable tag; pin it by digest: `rekindle images push`", image)
    return definition


def _warn_of_containers(platform: str, graph: Graph) -> None:
    """Warn of what images need that no compiler can look into."""
    support = feature_rows()["container_components"].on.get(platform)
    paths = [use.path for use in uses(graph) if use.feature == "container_components"]
    if paths and support and support.verdict == "emulated":
        log.warning("%s on %s: %s", ", ".join(paths), platform, support.how)


def _warn_of_local_paths(platform: str, spec: Spec) -> None:
    """Warn of paths of this machine, which steps elsewhere may not have."""
    model = spec.model
    named_sources: list[tuple[str, object]] = []
    if spec.data is not None:
        named_sources += [("data.source", part.source) for part in spec.data.parts]
    named_sources += [
        ("model.source", model.source),
        ("model.init_from", model.init_from),
        ("model.tokenizer", model.tokenizer),
    ]
    if model.teacher is not None:
        named_sources.append(("model.teacher.source", model.teacher.source))
    for field, path in named_sources:
        # Path.glob refuses absolute patterns
        if isinstance(path, str) and path.startswith("/") and glob.glob(path):  # noqa: PTH207
            log.warning(
                "%s: %s is on this machine; steps on %s read it only where a volume or their "
                "image has it. Name a URI, such as s3://",
                field,
                path,
                platform,
            )


def spread(spec: Spec, graph: Graph) -> Graph:
    """The graph with training, scoring and data steps on the machines of the config."""
    if spec.pipeline is None and spec.data and spec.data.nodes > 1:
        for step in ON_PIECES:
            graph = graph.spread(step, Distribution(nodes=spec.data.nodes))
    defaults = ResourcesSpec()
    machines = {name: getattr(spec.resources, name) for name in ResourcesSpec.MACHINES}
    if machines == {name: getattr(defaults, name) for name in machines}:
        return graph
    if spec.pipeline is not None:
        raise RequestError(
            "`resources` are for the steps of rekindle's own pipeline that train and score",
            where="resources",
            fix="call rekindle.distribute(task, nodes=...) in your pipeline",
        )
    distribution = Distribution(checkpoint=_CHECKPOINT, **machines)
    problems = distribution.problems(frozenset([_CHECKPOINT]), "resources")
    if problems:
        raise RequestError(problems)
    for step in ON_MACHINES:
        graph = graph.spread(step, distribution)
    return graph


def _only_here(uri: str) -> str:
    """A name for the registry of a tracking URI that only this machine sees, or ""."""
    if not uri:
        return "the embedded registry"
    if uri == "databricks":  # MLflow's own word for one that the environment names
        return ""
    parts = urlsplit(uri)
    is_file = parts.scheme in ("", "file", "sqlite") or parts.scheme.startswith("sqlite+")
    is_here = parts.hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - refused
    return f"`{uri}`" if is_file or is_here else ""


def _problems_of_the_shipped_pipeline(platform: str, spec: Spec) -> Iterator[Problem]:
    """What rekindle's own pipeline needs of a platform.

    What a platform needs of any pipeline its compiler asks for."""
    if spec.pipeline is not None:
        return
    registry = _only_here(spec.registration.tracking_uri)
    if registry:
        yield Problem(
            f"{registry} is on this machine; a cluster cannot reach it",
            "register.tracking_uri",
            "name a tracking server, such as https://mlflow.example.com",
        )
    if spec.deploy.after_promotion:
        yield from _problems_of_a_deploying_step(platform, spec)
    section = spec.platforms.section(platform)
    root = section.artifact_root
    if section.ARTIFACT_ROOT_EXAMPLE and "://" not in root and not root.startswith("/"):
        field = f"{section.PATH}.artifact_root"
        yield Problem(
            "checkpoints need a place that outlives a step",
            field,
            f"set {field}: {section.ARTIFACT_ROOT_EXAMPLE}",
        )


def _problems_of_a_deploying_step(platform: str, spec: Spec) -> Iterator[Problem]:
    """What the config asks of a step that deploys, and such a step cannot do."""
    if spec.deploy.precision:
        yield Problem(
            "a step that deploys has no test split to measure the precision on",
            "deploy.precision",
            "leave one of them out; `rekindle deploy` measures it where the model was trained",
        )
    yield from spec.platforms.section(platform).problems_of_a_deploying_step()
    elsewhere = [name for name in spec.registration.publish if name != platform]
    if elsewhere:
        yield Problem(
            f"a deployment that goes back on {platform} would not be followed on {elsewhere[0]}",
            "register.publish",
            f"leave out {', '.join(elsewhere)}",
        )
