"""What splits of a source have to hold: rows, and each of the classes."""

from collections.abc import Mapping, Sequence

from rekindle.rows.findings import SHOWN, Findings, shorten

_LISTED_LABELS = 20


def note_single_class(findings: Findings, label: str) -> None:
    """Note that there is nothing to tell apart: all rows have this label."""
    findings.note(
        f"every row has the label `{shorten(label)}`",
        fix="a classifier needs at least two classes",
    )


def check_splits(
    rows: Mapping[str, int],
    class_rows: Mapping[str, Mapping[str, int]],
    labels: Sequence[str],
    required: Sequence[str],
    complete: Sequence[str],
    findings: Findings,
    left_out: Mapping[str, int],
) -> None:
    """Note `required` splits that are empty, and classes that a split of `complete`
    lacks; `rows` counts per split, `class_rows` per split and label, `left_out` those of
    no split."""
    if len(labels) == 1:
        note_single_class(findings, labels[0])
    sizes = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    sizes += "".join(f"; left out: {kind} {count:,}" for kind, count in left_out.items())
    for split, count in rows.items():
        if count and split in complete:
            _check_classes(split, class_rows[split], labels, findings)
        elif not count and split in required:
            findings.note(
                f"the split {split} is empty",
                where=sizes,
                fix="give it a larger share in data.split, or more data",
            )


def _check_classes(
    split: str, counts: Mapping[str, int], labels: Sequence[str], findings: Findings
) -> None:
    """Note the classes that a split has no row of."""
    absent = [label for label in labels if not counts.get(label)]
    if not absent:
        return
    classes = ", ".join(f"`{shorten(label)}`" for label in absent[:SHOWN])
    if len(absent) > SHOWN:
        classes += f" and {len(absent) - SHOWN} more"
    sizes = [f"{shorten(label)} {counts.get(label, 0):,}" for label in labels[:_LISTED_LABELS]]
    findings.note(
        f"the split {split} has no row of class {classes}",
        where=", ".join(sizes),
        fix="give the split a larger share, add rows of the class, or leave the class out: "
        "name the others in data.labels, and set data.on_bad_rows: drop",
    )
