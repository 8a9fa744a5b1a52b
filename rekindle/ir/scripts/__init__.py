"""Programs that stand in front of a step's command, or in its place, where KFP's backend
runs the step (ir/edit/backend.py), and how the reader of a compiled pipeline knows them
again (ir/read/containers.py)."""

import base64
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

from rekindle.ir.graph import Retry

_FOLDER = Path(__file__).parent
RETRY = (_FOLDER / "retry.sh").read_text(encoding="utf-8")
UNPACK = (_FOLDER / "unpack.sh").read_text(encoding="utf-8")
TELL_STATUS = (_FOLDER / "tell_status.py").read_text(encoding="utf-8")


def retrying(retry: Retry) -> list[str]:
    """What stands in front of a command that is run again where it fails."""
    factor = max(1, int(retry.factor))
    pause = math.ceil(retry.pause_seconds)
    longest_pause = math.ceil(retry.cap_seconds)
    numbers = (retry.count, pause, factor, longest_pause)
    return ["sh", "-c", RETRY, "sh", *map(str, numbers)]


def telling_status(inputs: Sequence[str]) -> list[str]:
    """What stands in front of a Python component with these inputs of type
    TASK_FINAL_STATUS."""
    return ["python3", "-c", TELL_STATUS, ",".join(inputs)]


def without_prefixes(command: Sequence[str]) -> list[str]:
    """A command without what `retrying` and `telling_status` put in front of it."""
    words = list(command)
    if words[:3] == ["sh", "-c", RETRY]:
        words = words[8:]
    if words[:3] == ["python3", "-c", TELL_STATUS]:
        words = words[4:]
    return words


def packed(source: str) -> str:
    """The source of a component as UNPACK reads it."""
    return base64.b64encode(zlib.compress(source.encode(), 9)).decode()


def unpacked(text: str, most_bytes: int) -> str:
    """What was `packed`; ValueError where that is something else, or more than that."""
    decompress = zlib.decompressobj()
    try:
        source = decompress.decompress(base64.b64decode(text, validate=True), most_bytes)
        return source.decode()
    except zlib.error as error:
        raise ValueError(f"it is not packed: {error}") from error
