"""What a run reads: the source when it began, and the shards made of it."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord


class Fingerprint(VersionedRecord):
    """Kind `fingerprint`: what the source held when the run began, and the keys that
    follow from it."""

    data: str
    """Hash of the bytes in the window."""
    tokenizing: str = ""
    """Hash of the folders that examples are encoded by; "": none."""
    window: str
    files: int
    bytes: int
    run_key: str
    """Identifies the training exactly: `work_key`, and where the weights started."""
    work_key: str
    """Follows from the data, the settings and the code."""
    init_from: str
    init_digest: str = ""
    """Hash of the files behind `init_from`; "": a model of the hub."""
    champion: str
    """The registry version to beat; "": none."""
    champion_digest: str = ""
    """Hash of its files."""


class ShardFile(Record):
    """One Arrow file of a manifest."""

    path: str
    """Relative to the manifest."""
    split: str
    rows: int
    tokens: int
    bytes: int
    sha256: str
    key: str = ""
    """Of its entry in the store of pieces."""
    longest: int = 0
    """Tokens of its longest row."""
    sequences: int = 0
    """How many the rows fill, where the task packs them."""
    examples: str = ""
    """Fingerprint of their hashes, in order."""
    source: int = 0
    """Which of several it is of, from 0."""


class MixedRows(Record):
    """A source of a mixture."""

    source: str
    rows: int
    """Its training examples."""
    share: float
    """Of an epoch's sequences, the part that is drawn from it."""
    epochs: float
    """How often an epoch goes through it."""


class ShardManifest(VersionedRecord):
    """Kind `shards`: `manifest.json` beside the shards.

    A shard that does not match its entry is refused at read."""

    task: str
    source: str
    window: str = ""
    tokenizer: str = ""
    examples: str = ""
    """Fingerprint of the examples of the shards."""
    labels: tuple[str, ...] = ()
    """In index order; empty where the task has none."""
    slices: tuple[str, ...] = ()
    """The columns that evaluation groups by."""
    rows: Mapping[str, int] = Field(default_factory=dict)
    """Per split."""
    dropped: Mapping[str, int] = Field(default_factory=dict)
    """Examples per split that hold nothing to learn from; empty: none."""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    """Rows that were dropped, by kind of fault (one with two faults twice)."""
    left_out: Mapping[str, int] = Field(default_factory=dict)
    """Other rows, by reason: `duplicate`, `gap`."""
    class_rows: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    """Per split and label; words, where each has a tag."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """What the task stored beside the shards: image shape, tokenizer length ..."""
    shuffle_bytes: int = 0
    """About how much a window of shards has, within which rows are shuffled."""
    disk_bytes: int = 0
    """Most that a node keeps of them, because they stay in the store of pieces; 0: they
    lie beside this file."""
    sources: tuple[MixedRows, ...] = ()
    """Of a mixture."""
    drawn: bool = False
    """Whether sources are drawn by their shares, else each row once an epoch."""
    notices: tuple[str, ...] = ()
    """What a person should know of how the examples were encoded."""
    shards: tuple[ShardFile, ...] = ()
