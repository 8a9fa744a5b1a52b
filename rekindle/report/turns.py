"""What `rekindle watch` decided, turn by turn, as it stands under a home."""

import contextlib
from pathlib import Path

from rekindle.records import Turn


def path_of(home: Path, slug: str) -> Path:
    """The file of the turns of a name."""
    return home / "watch" / f"{slug}.jsonl"


def turns(path: Path) -> list[Turn]:
    """The turns in such a file, the oldest first, each as it ended; none where there is no file."""
    found = dict[str, Turn]()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # cut short, or of another version
                one = Turn.model_validate_json(line)
                found[one.turn] = one
    return list(found.values())
