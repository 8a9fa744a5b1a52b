"""The cache of step results: content decides what is the same work, and every hit or miss has a
reason in words.

The key of a step hashes what goes into it: the component (source, command, args, image, env), its
inputs by content, the types of its outputs, and the hash of rekindle's own code. Paths, times and
run ids are not part of it. An entry lists the outputs with every file's size and sha256, and holds
a hash of itself; it is believed only while the files are still as listed. Paths under the home
count relative to it, so that a home can be moved, and a copy of a home uses its own files."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rekindle.ir.graph import Step
from rekindle.platforms.bundle import lowered_container
from rekindle.platforms.local.content import FileFact, describe, digest, local_path
from rekindle.platforms.local.store import Store
from rekindle.records import ArtifactRecord, moved, write_atomically

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_HOME = "\0home"  # in no path
_CHANGED = {
    "component": "its source changed",
    "outputs": "the types of its outputs changed",
    "rekindle": "rekindle's code changed",
    "own code": "code of yours that it uses changed",
    "image": "the image it runs in changed",
    "cache key": "its cache key changed",
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """An artifact on this machine, with all its files."""

    uri: str
    schema_title: str
    schema_version: str
    metadata: Mapping[str, Any]
    files: Mapping[str, FileFact]

    @property
    def digest(self) -> str:
        return digest(self.files)

    def record(self) -> ArtifactRecord:
        return ArtifactRecord(
            uri=self.uri, schema_title=self.schema_title, metadata=self.metadata, digest=self.digest
        )


# hashes of the user's own files as they are now, of those names that have any
OwnCode = Callable[[Collection[str]], Mapping[str, str]]
Given = Stored | tuple[Stored, ...]  # an artifact, or a list of them


@dataclasses.dataclass(frozen=True)
class Values:
    """Parameters and artifacts that go into a node, or come out of it."""

    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    artifacts: Mapping[str, Given] = dataclasses.field(default_factory=dict)


def each(given: Given) -> tuple[Stored, ...]:
    """One artifact or several, as several."""
    return given if isinstance(given, tuple) else (given,)


NOTHING = Values()


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a step's work is made of: one hash a `fact`, and the `key` over all of them."""

    facts: Mapping[str, str]

    @property
    def key(self) -> str:
        return _hash(dict(self.facts))[:32]


def names_of_code(step: Step, inputs: Values) -> list[str]:
    """By what a step's files of the user are known: its component, and values that may name one."""
    return [step.component, *(v for v in inputs.parameters.values() if isinstance(v, str))]


def identify(
    step: Step,
    inputs: Values,
    source_hash: str,
    image_id: str,
    own_code: Mapping[str, str],
    home: str,
) -> Identity:
    """The identity of `step` on `inputs`, in a container if there is an `image_id`. A `cache_key`
    of the user's stands in for everything but the outputs. `own_code` are hashes of the user's own
    files, by component or by the value of a parameter. Paths under `home` count relative to it."""
    container = step.container
    outputs = {
        "parameters": {n: p.type for n, p in step.outputs.parameters.items()},
        "artifacts": {n: a.schema_title for n, a in step.outputs.artifacts.items()},
    }
    if step.cache_key:
        own_key = _hash([step.component, step.cache_key])
        return Identity({"cache key": own_key, "outputs": _hash(outputs)})
    lowered = lowered_container(step)
    component: dict[str, Any] = {key: lowered[key] for key in ("source", "command", "args", "env")}
    component |= {"image": container.image, "requirements": container.requirements}
    if step.distribution is not None:
        component["nodes"] = step.distribution.nodes
        component["gpus per node"] = step.distribution.gpus_per_node
    facts = {"component": _hash(component), "outputs": _hash(outputs), "rekindle": source_hash}
    if image_id:
        facts["image"] = image_id
    named = names_of_code(step, inputs)
    if used := sorted({own_code[name] for name in named if name in own_code}):
        facts["own code"] = _hash(used)
    given: dict[str, Any] = dict(inputs.parameters)
    for name, artifact in inputs.artifacts.items():
        several = [[a.digest or a.uri, a.schema_title, a.metadata] for a in each(artifact)]
        given[name] = several if isinstance(artifact, tuple) else several[0]
    facts |= {f"input {name}": _hash(moved(value, home, _HOME)) for name, value in given.items()}
    return Identity(facts)


def look_up(store: Store, identity: Identity) -> tuple[Values | None, str]:
    """The outputs for `identity` if their files are there, else None; and why ("": unknown)."""
    try:
        raw = json.loads(store.entry(identity.key).read_bytes())
        if raw.pop("sha256") != _hash(raw):
            return None, "its cache entry was damaged"
        here = moved(raw["outputs"], raw.get("home", ""), str(store.home))
        found = {
            name: Stored(**{**a, "files": {n: FileFact(*fact) for n, fact in a["files"].items()}})
            for name, a in here["artifacts"].items()
        }
        run_id, outputs = raw["run_id"], Values(dict(here["parameters"]), found)
    except FileNotFoundError:
        return None, ""
    except _MALFORMED:
        return None, "its cache entry cannot be read"
    artifacts = {}
    for name, artifact in found.items():
        path = local_path(artifact.uri)
        now = describe(path, artifact.files) if path and artifact.files else artifact.files
        if digest(now) != artifact.digest:
            return None, f"artifact `{name}` {'changed on disk' if now else 'is gone'}"
        artifacts[name] = dataclasses.replace(artifact, files=now)
    if artifacts != found:  # copied or touched: note the new times and inodes
        with contextlib.suppress(OSError):
            _put(store, identity, run_id, Values(outputs.parameters, artifacts))
    return outputs, f"same inputs and code as in run {run_id}"


def explain_miss(store: Store, slug: str, identity: Identity) -> str:
    """Why there is no entry: what differs from the newest result of the same step."""
    try:
        last = dict(json.loads(store.last(slug).read_bytes())["facts"])
    except (FileNotFoundError, *_MALFORMED):
        return "first run of this step"
    names = [*identity.facts, *(name for name in last if name not in identity.facts)]
    changed = [name for name in names if last.get(name) != identity.facts.get(name)]
    inputs = [f"`{name.removeprefix('input ')}`" for name in changed if name.startswith("input ")]
    said = [_CHANGED[name] for name in changed if name in _CHANGED]
    if inputs:
        said.append(f"input{'s' if len(inputs) > 1 else ''} {', '.join(inputs)} changed")
    return " and ".join(said) or "its cached result was removed"


def save(store: Store, slug: str, identity: Identity, run_id: str, outputs: Values) -> None:
    """Make `outputs` the result for `identity`, once all its files are written."""
    _put(store, identity, run_id, outputs)
    last = {"run_id": run_id, "key": identity.key, "facts": dict(identity.facts)}
    write_atomically(store.last(slug), json.dumps(last))


def lend(lender: Store, borrower: Store) -> None:
    """Give a scratch home the results of another one, whose files it uses where they are."""
    for file in (lender.home / "cache").glob("*.json"):
        with contextlib.suppress(*_MALFORMED):
            entry = json.loads(file.read_bytes())
            if entry.pop("sha256") == _hash(entry):
                entry["home"] = str(borrower.home)  # so that no path counts as moved
                text = json.dumps({**entry, "sha256": _hash(entry)})
                write_atomically(borrower.entry(file.stem), text)


def _put(store: Store, identity: Identity, run_id: str, outputs: Values) -> None:
    artifacts = {}
    for name, given in outputs.artifacts.items():
        (a,) = each(given)
        files = {file: dataclasses.astuple(fact) for file, fact in a.files.items()}
        artifacts[name] = {**vars(a), "metadata": dict(a.metadata), "files": files}
    entry = {
        "run_id": run_id,
        "home": str(store.home),
        "facts": dict(identity.facts),
        "outputs": {"parameters": dict(outputs.parameters), "artifacts": artifacts},
    }
    write_atomically(store.entry(identity.key), json.dumps({**entry, "sha256": _hash(entry)}))


def stored(artifacts: Mapping[str, Mapping[str, Any]]) -> dict[str, Stored]:
    """Artifacts as a step's shim reports them, with what is on disk."""
    found = {}
    for name, artifact in artifacts.items():
        path = local_path(artifact["uri"])
        said = {key: artifact[key] for key in ("uri", "schema_title", "schema_version", "metadata")}
        found[name] = Stored(**said, files=describe(path) if path else {})
    return found


def _hash(value: Any) -> str:
    # unlike canonical_json this takes NaN: a loss may be that, and its reader has to see it
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
