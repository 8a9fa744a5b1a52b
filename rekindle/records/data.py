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
    """The window of the data, resolved, as text; "": all."""
    files: int
    """How many files the source has, in the window where its path names partitions."""
    bytes: int
    """The size of these files together."""
    run_key: str
    """Identifies the training exactly: a hash of `work_key` and of the starting weights."""
    work_key: str
    """A hash of the data, the settings and the code."""
    init_from: str
    """Where the starting weights come from."""
    init_digest: str = ""
    """Hash of the files behind `init_from`; "": a model of the hub."""
    champion: str
    """The registry version to beat; "": none."""
    champion_digest: str = ""
    """Hash of the champion's files; "": no champion."""


class ShardFile(Record):
    """One Arrow file of a manifest."""

    path: str
    """Relative to the manifest."""
    split: str
    rows: int
    """How many examples it holds."""
    tokens: int
    """Of all its rows; 0 where the task has no tokens."""
    bytes: int
    sha256: str
    key: str = ""
    """The key of its entry in the store of pieces."""
    longest: int = 0
    """Tokens of its longest row."""
    sequences: int = 0
    """How many sequences its rows fill, where the task packs them."""
    examples: str = ""
    """Hash of the hashes of its examples, in order."""
    source: int = 0
    """The number of the source that its rows are of, from 0; of a mixture there are several."""


class MixedRows(Record):
    """What training draws from one source of a mixture."""

    source: str
    rows: int
    """How many training examples the source has."""
    share: float
    """The part of an epoch's sequences that is drawn from this source."""
    epochs: float
    """How often one epoch of the mixture goes through this source."""


class ShardManifest(VersionedRecord):
    """Kind `shards`: `manifest.json` beside the shards.

    A shard that does not match its entry is refused when it is read."""

    task: str
    source: str
    """The fingerprint of the data."""
    window: str = ""
    """The window of the data, resolved, as text; "": all."""
    tokenizer: str = ""
    """Hash of the files that the task encodes examples with, such as the tokenizer's."""
    examples: str = ""
    """Hash of the examples of all shards."""
    labels: tuple[str, ...] = ()
    """In index order; empty where the task has none."""
    slices: tuple[str, ...] = ()
    """The columns that evaluation groups by."""
    rows: Mapping[str, int] = Field(default_factory=dict)
    """How many examples each split has."""
    dropped: Mapping[str, int] = Field(default_factory=dict)
    """Examples per split that were dropped, as they hold nothing to learn from; empty: none."""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    """Rows that were dropped, by kind of fault; a row with two faults counts for both."""
    left_out: Mapping[str, int] = Field(default_factory=dict)
    """Rows without a fault that are in no split, by reason: `duplicate`, `gap`."""
    class_rows: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    """Examples per split and label; where each word has a label, words."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """What the task stored beside the shards: image shape, tokenizer length ..."""
    shuffle_bytes: int = 0
    """About how many bytes the shards have together whose rows are shuffled together."""
    disk_bytes: int = 0
    """How many bytes of the shards a node keeps at most, where they stay in the store of
    pieces; 0: they lie beside this file."""
    sources: tuple[MixedRows, ...] = ()
    """The sources of a mixture; empty for a single source."""
    drawn: bool = False
    """Whether an epoch draws from the sources by their shares; if not, it has each row once."""
    notices: tuple[str, ...] = ()
    """What a person should know of how the examples were encoded."""
    shards: tuple[ShardFile, ...] = ()
