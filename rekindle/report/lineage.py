"""Where a model comes from: keys and hashes that identify the work, how to repeat it, classes."""

import contextlib

import yaml

from rekindle.records import RunRecord, ShardManifest
from rekindle.report.collect import Findings
from rekindle.spec.identity import file_sha256

Facts = list[tuple[str, str]]


def lineage(run: RunRecord, found: Findings) -> tuple[Facts, Facts]:
    """Everything that says which work this was, and what else the registry's tags say of it."""
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
            entries.append(("Evidence file, sha256", file_sha256(found.files["evidence"])))
    if found.registration:
        entries.append(("Registry", found.registration.tracking_uri))
    shown = [(name, value) for name, value in entries if value]
    known = {value for _, value in shown}
    tags = found.registration.tags if found.registration else {}
    return shown, [(name, value) for name, value in sorted(tags.items()) if value not in known]


def configuration(run: RunRecord) -> str:
    """The resolved configuration as YAML; empty if the run has none."""
    plain = run.model_dump(mode="json")
    shown = {key: plain[key] for key in ("spec", "arguments") if plain[key]}
    if not shown:
        return ""
    body = shown.get("spec") if list(shown) == ["spec"] else shown
    return str(yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=100))


def classes(manifest: ShardManifest | None) -> tuple[list[str], dict[str, int], float]:
    """The classes in index order, those that no label announces last; the rows of each split; and
    the largest share of a split that a class has."""
    if not manifest or not manifest.class_rows:
        return [], {}, 1.0
    totals = {split: sum(rows.values()) for split, rows in manifest.class_rows.items()}
    filled = [(totals[split], by) for split, by in manifest.class_rows.items() if totals[split]]
    most = max((rows / total for total, by in filled for rows in by.values()), default=1.0)
    names = (name for rows in manifest.class_rows.values() for name in rows)
    return list(dict.fromkeys([*manifest.labels, *names])), totals, most
