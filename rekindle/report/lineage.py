"""Where a model comes from: keys and hashes that identify the work, how to repeat it, classes."""

import contextlib

import yaml

from rekindle.records import RunRecord, ShardManifest
from rekindle.report.collect import Findings
from rekindle.spec.identity import file_sha256


def evidence_sha256(found: Findings) -> str:
    """Hash of the file of the evidence; "" where there is none."""
    with contextlib.suppress(OSError, KeyError):
        return file_sha256(found.files["evidence"])
    return ""


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
