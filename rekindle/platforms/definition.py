"""What a platform's compiler makes."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Definition:
    """What is submitted: file names and their bytes. One file, the definition itself, lies in no
    folder; the others are what its steps run."""

    files: Mapping[str, bytes]

    @property
    def entry(self) -> str:
        """The name of the definition itself."""
        (name,) = (name for name in self.files if "/" not in name)
        return name

    @property
    def text(self) -> bytes:
        """The definition itself."""
        return self.files[self.entry]

    @contextlib.contextmanager
    def written(self) -> Iterator[Path]:
        """The definition itself as a file, with all others beside it, as long as the block runs."""
        with tempfile.TemporaryDirectory(prefix="rekindle-") as folder:
            for name, content in self.files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            yield Path(folder, self.entry)
