"""A spec's pipeline as one platform's Definition; sends nothing."""

import glob
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

from rekindle.app.pipeline import ON_MACHINES, ON_PIECES, arguments_of
from rekindle.app.plan import settled
from rekindle.catalog.tables import feature_rows
from rekindle.errors import Problem, RequestError, collected
from rekindle.ir.distribution import Distribution
from rekindle.ir.features import uses
from rekindle.ir.graph import Graph
from rekindle.platforms import user_code as own
from rekindle.platforms.platform import Platform
from rekindle.platforms.submission import Definition, problems_in
from rekindle.spec.model import ResourcesSpec, Spec

log = logging.getLogger(__name__)

_CHECKPOINT = "artifact_root"
_problem = problems_in(__file__)


def compiled(platform: str, spec: Spec, text: str, graph: Graph) -> Definition:
    """The definition for one platform; RequestError with everything that is wrong."""
    problems = list(_lacks(platform, spec))
    there = Platform.of(platform, spec.platforms)
    with collected(problems):
        spec = settled(spec, platform)
    with collected(problems):
        code = own.code_of(spec, graph)
        problems += own.problems(platform, spec, graph, code)
        spec = own.placed(spec, code)
    with collected(problems):
        graph = spread(spec, graph)
    with collected(problems):
        arguments = arguments_of(spec, graph, there.settings.artifact_root, platform)
        definition = there.compile(text, graph, arguments)
    if problems:
        raise RequestError(dict.fromkeys(problems))
    _say_what_is_needed(platform, graph)
    _say_what_is_here(platform, spec)
    if (image := there.settings.image) and "@" not in image:
        log.warning("%s is a mutable tag; pin it by digest: `rekindle images push`", image)
    return definition


def _say_what_is_needed(platform: str, graph: Graph) -> None:
    """Warn of what images need that no compiler can look into."""
    carried = feature_rows()["container_components"].on.get(platform)
    paths = [use.path for use in uses(graph) if use.feature == "container_components"]
    if paths and carried and carried.verdict == "emulated":
        log.warning("%s on %s: %s", ", ".join(paths), platform, carried.how)


def _say_what_is_here(platform: str, spec: Spec) -> None:
    """Warn of paths of this machine, which steps elsewhere may not have."""
    model, data = spec.model, spec.data
    named = [
        *(("data.source", part.source) for part in (data.parts if data else ())),
        ("model.source", model.source),
        ("model.init_from", model.init_from),
        ("model.tokenizer", model.tokenizer),
        ("model.teacher.source", model.teacher.source if model.teacher else ""),
    ]
    for field, path in named:
        # Path.glob refuses absolute patterns
        if isinstance(path, str) and path.startswith("/") and glob.glob(path):  # noqa: PTH207
            log.warning(
                "%s: %s is on this machine; steps on %s read it only where a volume or their image "
                "has it. Name a URI, such as s3://",
                field,
                path,
                platform,
            )


def spread(spec: Spec, graph: Graph) -> Graph:
    """The steps that train, score or read data, on the machines that the config asks for."""
    asked = spec.resources
    if spec.pipeline is None and spec.data and spec.data.nodes > 1:
        for step in ON_PIECES:
            graph = graph.spread(step, Distribution(nodes=spec.data.nodes))
    machines = {name: getattr(asked, name) for name in ResourcesSpec.MACHINES}
    if machines == {name: getattr(ResourcesSpec(), name) for name in machines}:
        return graph
    if spec.pipeline is not None:
        raise RequestError([_problem("resources")])
    wanted = Distribution(checkpoint=_CHECKPOINT, **machines)
    if problems := wanted.problems(frozenset([_CHECKPOINT]), "resources"):
        raise RequestError(problems)
    for step in ON_MACHINES:
        graph = graph.spread(step, wanted)
    return graph


def _only_here(uri: str) -> str:
    """What a tracking URI means that steps elsewhere do not see, or ""."""
    found = urlsplit(uri)
    if not uri:
        return "the embedded registry"
    if uri == "databricks":  # MLflow's own word for one that the environment names
        return ""
    is_file = found.scheme in ("", "file", "sqlite") or found.scheme.startswith("sqlite+")
    is_here = found.hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - refused
    return f"`{uri}`" if is_file or is_here else ""


_AS_USER = ("azureml", "user")
_ROOTS = {
    "azureml": "abfs://container@account.dfs.core.windows.net/rekindle",
    "kubeflow": "s3://my-bucket/rekindle, or the mount point of a volume that all pods share",
}


def _lacks(platform: str, spec: Spec) -> Iterator[Problem]:
    """What rekindle's own pipeline needs of a platform beside what its compiler asks for."""
    if spec.pipeline is not None:
        return
    if place := _only_here(spec.registration.tracking_uri):
        yield _problem("local_registry", place=place)
    if spec.deploy.after_promotion and spec.deploy.precision:
        yield _problem("precision")
    if spec.deploy.after_promotion and (platform, spec.platforms.azureml.identity) == _AS_USER:
        yield _problem("as_user")
    elsewhere = [name for name in spec.registration.publish if name != platform]
    if spec.deploy.after_promotion and elsewhere:
        names = ", ".join(elsewhere)
        yield _problem("publish_elsewhere", platform=platform, elsewhere=elsewhere, names=names)
    root = getattr(spec.platforms, platform).artifact_root
    if platform in _ROOTS and "://" not in root and not root.startswith("/"):
        yield _problem("no_root", platform=platform, root=_ROOTS[platform])
