"""Where a model comes from: keys and hashes that identify the work,
how to repeat it, classes."""

import contextlib

import yaml

from rekindle.records import RunRecord, ShardManifest
from rekindle.report.collect import RunFindings
from rekindle.spec.identity import file_sha256


def evidence_sha256(findings: RunFindings) -> str:
    """Hash of the file of the evidence; "" where there is none."""
    with contextlib.suppress(OSError, KeyError):
        return file_sha256(findings.files["evidence"])
    return ""


def configuration(run: RunRecord) -> str:
    """The resolved configuration as YAML; empty if the run has none."""
    record = run.model_dump(mode="json")
    sections = {key: record[key] for key in ("spec", "arguments") if record[key]}
    if not sections:
        return ""
    if list(sections) == ["spec"]:  # as the user's own file has it
        sections = sections["spec"]
    return str(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100))


def classes(manifest: ShardManifest | None) -> tuple[list[str], dict[str, int], float]:
    """The classes in index order, those that no label announces last; the rows of each
    split; and the largest share of a split that a class has."""
    if not manifest or not manifest.class_rows:
        return [], {}, 1.0
    names = dict.fromkeys(manifest.labels)
    totals = {}
    shares = []
    for split, rows_by_class in manifest.class_rows.items():
        total = sum(rows_by_class.values())
        totals[split] = total
        names |= dict.fromkeys(rows_by_class)
        if total:  # a split may be empty
            shares += [rows / total for rows in rows_by_class.values()]
    return list(names), totals, max(shares, default=1.0)
