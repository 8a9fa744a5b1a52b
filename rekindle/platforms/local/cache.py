"""The cache of step results: content decides what is the same work, and every hit or miss
has a reason in words.

The key of a step hashes what goes into it: the component (source, command, args, image,
env), its inputs by content, the types of its outputs, and the hash of rekindle's own
code. Paths, times and run ids are not part of it. An entry lists the outputs with every
file's size and sha256, and holds a hash of itself; it is believed only while the files
are still as listed. Paths under the home count relative to it, so that a home can be
moved, and a copy of a home uses its own files."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rekindle.ir.graph import Step
from rekindle.platforms.bundle import lowered_container
from rekindle.platforms.local.content import FileFact, describe, digest, local_path
from rekindle.platforms.local.store import HomeStore
from rekindle.records import ArtifactRecord, moved, write_atomically

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_HOME = "\0home"  # stands for the home in hashed values; no path has a NUL
_CHANGED = {
    "component": "its source changed",
    "outputs": "the types of its outputs changed",
    "rekindle": "rekindle's code changed",
    "own code": "code of yours that it uses changed",
    "image": "the image it runs in changed",
    "cache key": "its cache key changed",
}


@dataclasses.dataclass(frozen=True)
class StoredArtifact:
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


# for each of the names that stands for files of the user's, their hash as they are now
OwnCode = Callable[[Collection[str]], Mapping[str, str]]
ArtifactValue = StoredArtifact | tuple[StoredArtifact, ...]  # an artifact, or a list of them


@dataclasses.dataclass(frozen=True)
class Values:
    """Parameters and artifacts that go into a node, or come out of it."""

    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    artifacts: Mapping[str, ArtifactValue] = dataclasses.field(default_factory=dict)


def as_artifacts(value: ArtifactValue) -> tuple[StoredArtifact, ...]:
    """One artifact or several, as several."""
    return value if isinstance(value, tuple) else (value,)


NO_VALUES = Values()


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a step's work is made of: a hash for each fact (`component`, `input x`, ...),
    and the `key` over all of them. The facts tell why a step was not found."""

    facts: Mapping[str, str]

    @property
    def key(self) -> str:
        return _hash(dict(self.facts))[:32]


def names_of_code(step: Step, inputs: Values) -> list[str]:
    """The names by which a step may use files of the user's: that of its component, and its
    values that are text, because one may be the name of a file or module."""
    values = [value for value in inputs.parameters.values() if isinstance(value, str)]
    return [step.component, *values]


def identify(
    step: Step,
    inputs: Values,
    source_hash: str,
    image_id: str,
    own_code: Mapping[str, str],
    home: str,
) -> Identity:
    """The identity of `step` on `inputs`.

    A `cache_key` that the user gave the step replaces everything but its outputs.
    `source_hash` is that of rekindle's code, `image_id` that of the image if the step runs
    in a container. `own_code` has hashes of the user's own files, by the names of
    `names_of_code`. Paths under `home` count relative to it."""
    ports = step.outputs
    outputs = {
        "parameters": {name: parameter.type for name, parameter in ports.parameters.items()},
        "artifacts": {name: artifact.schema_title for name, artifact in ports.artifacts.items()},
    }
    if step.cache_key:
        own_key = _hash([step.component, step.cache_key])
        return Identity({"cache key": own_key, "outputs": _hash(outputs)})
    lowered = lowered_container(step)
    component: dict[str, object] = {
        "source": lowered["source"],
        "command": lowered["command"],
        "args": lowered["args"],
        "env": lowered["env"],
        "image": step.container.image,
        "requirements": step.container.requirements,
    }
    if step.distribution is not None:
        component["nodes"] = step.distribution.nodes
        component["gpus per node"] = step.distribution.gpus_per_node
    facts = {"component": _hash(component), "outputs": _hash(outputs), "rekindle": source_hash}
    if image_id:
        facts["image"] = image_id
    own_hashes = {own_code[name] for name in names_of_code(step, inputs) if name in own_code}
    if own_hashes:
        facts["own code"] = _hash(sorted(own_hashes))
    values: dict[str, object] = dict(inputs.parameters)
    for name, artifact_or_list in inputs.artifacts.items():
        if isinstance(artifact_or_list, tuple):
            values[name] = [_content_of(artifact) for artifact in artifact_or_list]
        else:
            values[name] = _content_of(artifact_or_list)
    for name, value in values.items():
        facts[f"input {name}"] = _hash(moved(value, home, _HOME))
    return Identity(facts)


def _content_of(artifact: StoredArtifact) -> list[object]:
    """What identifies an artifact: its bytes, or the URI of one that is not on this machine."""
    return [artifact.digest or artifact.uri, artifact.schema_title, artifact.metadata]


def look_up(store: HomeStore, identity: Identity) -> tuple[Values | None, str]:
    """The outputs for `identity`, None without them; and why in words.

    Without an entry the reason is "": `explain_miss` finds it."""
    try:
        raw = json.loads(store.entry(identity.key).read_bytes())
        if raw.pop("sha256") != _hash(raw):
            return None, "its cache entry was damaged"
        outputs = moved(raw["outputs"], raw.get("home", ""), str(store.home))
        recorded = {name: _read_back(entry) for name, entry in outputs["artifacts"].items()}
        parameters = dict(outputs["parameters"])
        run_id = raw["run_id"]
    except FileNotFoundError:
        return None, ""
    except _MALFORMED:
        return None, "its cache entry cannot be read"
    artifacts = {}
    for name, artifact in recorded.items():
        path = local_path(artifact.uri)
        files = artifact.files
        if path and files:
            files = describe(path, files)
        if digest(files) != artifact.digest:
            message = "changed on disk" if files else "is gone"
            return None, f"artifact `{name}` {message}"
        artifacts[name] = dataclasses.replace(artifact, files=files)
    # the files are the same, but were copied or touched: with their new times and inodes in
    # the entry, they need not be hashed once more
    if artifacts != recorded:
        with contextlib.suppress(OSError):
            _put(store, identity, run_id, Values(parameters, artifacts))
    return Values(parameters, recorded), f"same inputs and code as in run {run_id}"


def _read_back(entry: Mapping[str, Any]) -> StoredArtifact:
    """An artifact as `_put` wrote it."""
    files = {name: FileFact(*fact) for name, fact in entry["files"].items()}
    return StoredArtifact(**{**entry, "files": files})


def explain_miss(store: HomeStore, slug: str, identity: Identity) -> str:
    """Why there is no entry: what differs from the newest result of the same step."""
    try:
        last = dict(json.loads(store.last(slug).read_bytes())["facts"])
    except (FileNotFoundError, *_MALFORMED):
        return "first run of this step"
    changed_inputs = []
    reasons = []
    for name in {**identity.facts, **last}:  # in this order, each once
        if last.get(name) == identity.facts.get(name):
            continue
        if name.startswith("input "):
            changed_inputs.append(f"`{name.removeprefix('input ')}`")
        elif name in _CHANGED:
            reasons.append(_CHANGED[name])
    if changed_inputs:
        noun = "inputs" if len(changed_inputs) > 1 else "input"
        reasons.append(f"{noun} {', '.join(changed_inputs)} changed")
    return " and ".join(reasons) or "its cached result was removed"


def save(store: HomeStore, slug: str, identity: Identity, run_id: str, outputs: Values) -> None:
    """Make `outputs` the result for `identity`; all its files have been written."""
    _put(store, identity, run_id, outputs)
    last = {"run_id": run_id, "key": identity.key, "facts": dict(identity.facts)}
    write_atomically(store.last(slug), json.dumps(last))


def lend(lender: HomeStore, borrower: HomeStore) -> None:
    """Give a scratch home the entries of another home; it uses that one's files in place."""
    for file in (lender.home / "cache").glob("*.json"):
        with contextlib.suppress(*_MALFORMED):
            entry = json.loads(file.read_bytes())
            if entry.pop("sha256") == _hash(entry):
                # paths under an entry's home move with the home; these stay where they are
                entry["home"] = str(borrower.home)
                text = json.dumps({**entry, "sha256": _hash(entry)})
                write_atomically(borrower.entry(file.stem), text)


def _put(store: HomeStore, identity: Identity, run_id: str, outputs: Values) -> None:
    artifacts = {}
    for name, value in outputs.artifacts.items():
        (artifact,) = as_artifacts(value)  # a step has no output that is a list
        files = {file: dataclasses.astuple(fact) for file, fact in artifact.files.items()}
        metadata = dict(artifact.metadata)
        artifacts[name] = {**vars(artifact), "metadata": metadata, "files": files}
    entry = {
        "run_id": run_id,
        "home": str(store.home),
        "facts": dict(identity.facts),
        "outputs": {"parameters": dict(outputs.parameters), "artifacts": artifacts},
    }
    write_atomically(store.entry(identity.key), json.dumps({**entry, "sha256": _hash(entry)}))


def stored(artifacts: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredArtifact]:
    """The artifacts that a step's shim reports, each with its files on this machine."""
    by_name = {}
    for name, artifact in artifacts.items():
        path = local_path(artifact["uri"])
        by_name[name] = StoredArtifact(
            artifact["uri"],
            artifact["schema_title"],
            artifact["schema_version"],
            artifact["metadata"],
            describe(path) if path else {},
        )
    return by_name


def _hash(value: object) -> str:
    # unlike canonical_json this takes NaN: a loss may be that, and its reader has to see
    # it
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
