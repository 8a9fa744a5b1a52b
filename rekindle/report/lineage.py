"""Where a model comes from: the data it saw, the keys and hashes that identify the work, and how to
do it again."""

import contextlib
import dataclasses
import hashlib

import yaml
from markupsafe import Markup

from rekindle import formats
from rekindle.records import Fingerprint, RunRecord, ShardManifest
from rekindle.report import plots
from rekindle.report.collect import Findings

_CLASSES_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows of one split, with a bar."""

    name: str
    rows: int
    share: float
    bar: Markup


@dataclasses.dataclass(frozen=True)
class ClassRow:
    """One class: for each split its rows, their share of the split, and a bar."""

    name: str
    cells: tuple[tuple[int, float, Markup], ...]


@dataclasses.dataclass(frozen=True)
class Data:
    """What the run was fed."""

    facts: tuple[tuple[str, str], ...]
    splits: tuple[Split, ...]
    classes: tuple[ClassRow, ...]
    more_classes: tuple[ClassRow, ...]
    class_splits: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Lineage:
    """What identifies the work, as (name, value)."""

    entries: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]


def data(run: RunRecord, found: Findings) -> Data | None:
    """The data section, from the shards' manifest and the fingerprint, whichever exists."""
    manifest, fingerprint = found.shards, found.fingerprint
    if not manifest and not fingerprint:
        return None
    facts = _data_facts(run, manifest, fingerprint)
    if not manifest:
        return Data(facts, (), (), (), ())
    total = sum(manifest.rows.values())
    splits = []
    for name, rows in manifest.rows.items():
        bar = plots.bar(rows, total, label=f"{name}: {rows} rows")
        splits.append(Split(name, rows, rows / total if total else 0.0, bar))
    classes = _classes(manifest)
    names = tuple(manifest.class_rows)
    return Data(facts, tuple(splits), classes[:_CLASSES_SHOWN], classes[_CLASSES_SHOWN:], names)


def lineage(run: RunRecord, found: Findings) -> Lineage:
    """Everything that says which work this was."""
    entries = [("Run", run.run_id)]
    if keys := found.fingerprint:
        entries += [("Run key", keys.run_key), ("Work key", keys.work_key)]
        entries.append(("Data fingerprint", keys.data))
    elif found.training:
        entries.append(("Run key", found.training.run_key))
    if found.shards and found.shards.examples:
        entries.append(("Examples", found.shards.examples))
    if found.training:
        entries.append(("Weights, sha256", found.training.weights_sha256))
        entries.append(("Seed", str(found.training.seed)))
        entries.append(("World size", str(found.training.world_size)))
    if found.evidence:
        entries.append(("Examples judged", found.evidence.examples))
        with contextlib.suppress(OSError):
            content = found.files["evidence"].read_bytes()
            entries.append(("Evidence file, sha256", hashlib.sha256(content).hexdigest()))
    if found.registration:
        entries.append(("Registry", found.registration.tracking_uri))
    shown = [(name, value) for name, value in entries if value]
    known = {value for _, value in shown}
    tags = found.registration.tags if found.registration else {}
    rest = tuple((name, value) for name, value in sorted(tags.items()) if value not in known)
    return Lineage(tuple(shown), rest, tuple(sorted(run.versions.items())))


def configuration(run: RunRecord) -> str:
    """The resolved configuration as YAML; empty if the run has none."""
    plain = run.model_dump(mode="json")
    shown = {key: plain[key] for key in ("spec", "arguments") if plain[key]}
    if not shown:
        return ""
    body = shown.get("spec") if list(shown) == ["spec"] else shown
    return str(yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=100))


def _data_facts(
    run: RunRecord, manifest: ShardManifest | None, fingerprint: Fingerprint | None
) -> tuple[tuple[str, str], ...]:
    facts: list[tuple[str, str]] = []
    if manifest:
        named = (run.spec.get("data") or {}).get("source")  # of files here, shards know a hash
        if not manifest.sources:
            facts.append(("Source", str(named or manifest.source)))
        for one in manifest.sources:
            seen = f"{formats.share(one.share)} of what is drawn, {one.epochs:.3g} times an epoch"
            facts.append((f"Source {one.source}", f"{formats.count(one.rows)} examples, {seen}"))
    window = (fingerprint and fingerprint.window) or (manifest and manifest.window)
    facts.append(("Window", formats.window(window) if window else "everything the source holds"))
    if fingerprint:
        files = f"{formats.count(fingerprint.files)} file{'' if fingerprint.files == 1 else 's'}"
        facts.append(("At the source", f"{files}, {formats.size(fingerprint.bytes)}"))
    if manifest:
        if left_out := sum(manifest.dropped.values()):
            facts.append(("Left out", f"{formats.count(left_out)} with nothing to learn from"))
        for kind, count in {**manifest.left_out, **manifest.bad_rows}.items():
            facts.append((f"Left out: {kind}", f"{formats.count(count)} rows"))
        shards = len(manifest.shards)
        held = formats.size(sum(shard.bytes for shard in manifest.shards))
        files = f"{formats.count(shards)} file{'' if shards == 1 else 's'}"
        facts.append(("As shards", f"{files}, {held}"))
        if tokens := sum(shard.tokens for shard in manifest.shards):
            facts.append(("Tokens", formats.count(tokens)))
        if manifest.tokenizer:
            facts.append(("Tokenizer", manifest.tokenizer))
    return tuple(facts)


def _classes(manifest: ShardManifest) -> tuple[ClassRow, ...]:
    """The classes in index order, those that no label announces last."""
    found = dict.fromkeys(name for rows in manifest.class_rows.values() for name in rows)
    totals = {split: sum(rows.values()) for split, rows in manifest.class_rows.items()}
    filled = [(totals[split], by) for split, by in manifest.class_rows.items() if totals[split]]
    most = max((rows / total for total, by in filled for rows in by.values()), default=1.0)
    result = []
    for name in dict.fromkeys([*manifest.labels, *found]):
        cells = []
        for split, by in manifest.class_rows.items():
            rows = by.get(name, 0)
            share = rows / totals[split] if totals[split] else 0.0
            said = f"{name}, {split}: {rows} rows, {formats.percent(share)}"
            cells.append((rows, share, plots.bar(share, most, label=said)))
        result.append(ClassRow(name, tuple(cells)))
    return tuple(result) if manifest.class_rows else ()
