"""Small sources of words with tags."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rekindle.spec.model import DataSpec
from tests.data.corpora import write_jsonl

TAGS = ("B-CITY", "I-CITY", "O")


def texts(count: int = 200) -> list[dict[str, Any]]:
    """Records with 3 to 9 words, some of them a city of one or two words."""
    pick = random.Random(0)
    found = []
    for number in range(count):
        words, tags = [], []
        for at in range(pick.randint(2, 7)):
            city = pick.random() < 0.3
            part = (
                pick.choice([["Leeds"], ["New", "York"]])
                if city
                else [f"word{pick.randint(0, 40)}"]
            )
            words += part
            tags += [f"{'BI'[i]}-CITY" if city else "O" for i in range(len(part))]
            words += [f"n{number}"] * (not at)  # no two texts are the same
            tags += ["O"] * (not at)
        found.append({"id": f"t{number}", "tokens": words, "tags": tags, "topic": f"t{number % 3}"})
    return found


def source(folder: Path, records: list[dict[str, Any]] | None = None, **fields: Any) -> DataSpec:
    """A file of them, and how it is read."""
    file = write_jsonl(folder / "x.jsonl", records or texts())
    columns = {"label": "tags", "key": "id"}
    return DataSpec.model_validate({"source": str(file), "columns": columns, **fields})
