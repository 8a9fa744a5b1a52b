"""Data sets of the Hugging Face hub, streamed: `hub:NAME?config=..&revision=..&split=..`.

`split=train+test` picks splits, default all of them; rows whose class is -1, a hidden
label, are left out. A fingerprint is the commit that the revision points to now."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import yaml

from rekindle.data.files import split_of
from rekindle.errors import DataError, RekindleError, RequestError
from rekindle.modalities import load_modality
from rekindle.rows import Columns
from rekindle.rows.columns import RawBatch, Source
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec

PREFIX = "hub:"
_OPTIONS = ("config", "revision", "split")
_BATCH_ROWS = 1_000


class HubSource(Source):
    """A data set of the hub, pinned to a commit on first use;
    or a part of it (see `parts`)."""

    def __init__(self, data: DataSpec, modality: str, part: Sequence[Any] = ()) -> None:
        self._name, _, query = data.source.removeprefix(PREFIX).partition("?")
        self._options = dict(parse_qsl(query.replace("+", "%2B")))
        unknown = sorted(set(self._options) - set(_OPTIONS))
        if unknown:
            fix = f"a hub source takes {', '.join(_OPTIONS)}"
            message = f"unknown option `{unknown[0]}` in {data.source}"
            raise RequestError(message, where="data.source", fix=fix)
        if Path(self._name).exists():  # `datasets` would read that, under the hub's fingerprint
            message = f"{Path(self._name).absolute()} has the name of the data set `{self._name}`"
            fix = "run the command in another folder, or name the path"
            raise RequestError(message, where="data.source", fix=fix)
        has_labels = load_modality(modality).label_type is not None
        self._label = data.columns.label if has_labels else ""
        self._own_splits = data.split.by == "source"
        self._part = part
        self._commit = part[1] if part else ""

    def read(self, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
        with _reading(self._name):
            for split, stream in self._splits().items():
                present = list(stream.features or columns)
                if not findings.missing_columns(f"{self._name} ({split})", columns, present):
                    yield from self._rows(split, stream, list(columns))

    def _rows(self, split: str, stream: Any, columns: list[str]) -> Iterator[RawBatch]:
        feature = (stream.features or {}).get(self._label)
        names = getattr(getattr(feature, "feature", feature), "names", None)  # also of a list
        own_split = split_of(split) if self._own_splits else ""
        row = 1
        if self._part:
            *_, index, count = self._part
            stream = stream.shard(count, index)
            if count > 1:
                split = f"{split}, part {index + 1} of {count}"
        for table in stream.select_columns(columns).with_format("arrow").iter(_BATCH_ROWS):
            lines = np.arange(row, row + len(table))
            row += len(table)
            arrays = {name: table.column(name).combine_chunks() for name in table.schema.names}
            raw = RawBatch(arrays, lines, split, own_split)
            if names:
                raw = self._with_class_names(raw, names)
            yield raw

    def parts(self) -> Iterator[tuple[str, str, str, int, int]]:
        """What workers read apart: name?config, commit, split,
        number and count of file groups."""
        name = f"{self._name}?{self._options.get('config', '')}"
        for split, stream in self._splits().items():
            for index in range(stream.num_shards):
                yield name, self._pin(), split, index, stream.num_shards

    def fingerprint(self) -> str:
        # the revision counts by the commit that it points to
        options = sorted((key, value) for key, value in self._options.items() if key != "revision")
        content = f"{self._name}\0{options}\0{self._pin()}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _with_class_names(self, raw: RawBatch, names: list[str]) -> RawBatch:
        """Class numbers as class names, in lists too; rows without a class left out."""
        column = raw.columns[self._label]
        class_names = pa.array(names, pa.string())
        if isinstance(column, pa.FixedSizeListArray):
            column = column.cast(pa.list_(column.type.value_type))
        if isinstance(column, (pa.ListArray, pa.LargeListArray)):  # a hidden one becomes null
            numbers = self._numbers(column.values, names)
            tags = class_names.take(pa.array(numbers, mask=numbers < 0))
            lists = type(column).from_arrays(column.offsets, tags)
            return dataclasses.replace(raw, columns={**raw.columns, self._label: lists})
        numbers = self._numbers(column, names)
        raw = raw.filter(numbers >= 0)
        labels = class_names.take(pa.array(numbers[numbers >= 0]))
        columns = {**raw.columns, self._label: labels}
        return RawBatch(columns, raw.lines, raw.file, raw.split)

    def _numbers(self, column: Any, names: list[str]) -> np.ndarray:
        """Class numbers, -1 for a hidden one; DataError for one that has no name."""
        numbers = np.asarray(column.fill_null(-1), np.int64)
        beyond = numbers[numbers >= len(names)]
        if beyond.size:
            message = f"`{self._label}` holds the class number {beyond[0]}, and the data set names "
            message += f"{len(names)} classes"
            fix = "correct the data set's card, or its data"
            raise DataError(message, where=self._name, fix=fix)
        return numbers

    def _pin(self) -> str:
        if not self._commit:
            from huggingface_hub import HfApi

            with _reading(self._name):
                info = HfApi().dataset_info(self._name, revision=self._options.get("revision"))
            self._commit = str(info.sha)
        return self._commit

    def _splits(self) -> dict[str, Any]:
        import datasets

        config = self._options.get("config")
        with _reading(self._name):
            self._refuse_foreign_files()
            streams = datasets.load_dataset(
                self._name, config, revision=self._pin(), streaming=True
            )
        names = list(streams)
        if "split" in self._options:
            names = self._options["split"].split("+")
        for name in names:
            if name not in streams:
                fix = f"it has {', '.join(streams)}"
                message = f"{self._name} has no split `{name}`"
                raise RequestError(message, where="data.source", fix=fix)
        if self._part:
            names = [self._part[2]]
        return {name: streams[name] for name in names}

    def _refuse_foreign_files(self) -> None:
        """Raise DataError where a card names files elsewhere, which no commit pins."""
        for card, configs in self._cards():
            for name in _names(configs):
                path = urlsplit(name)
                is_outside = path.scheme or "::" in name or ".." in path.path.split("/")
                if is_outside or name.startswith(("/", "~")):
                    message = f"{card} names `{name}`, which is not a file of the data set"
                    fix = "use a data set whose card names its own files"
                    raise DataError(message, where=self._name, fix=fix)

    def _cards(self) -> Iterator[tuple[str, Any]]:
        """The `configs` of both files that may have them."""
        from huggingface_hub import DatasetCard, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        for card in ("README.md", ".huggingface.yaml"):
            try:
                file = hf_hub_download(self._name, card, repo_type="dataset", revision=self._pin())
            except LocalEntryNotFoundError:
                raise  # the hub did not answer, which says nothing
            except EntryNotFoundError:
                continue
            try:
                if card == "README.md":
                    settings = DatasetCard.load(file).data.to_dict()
                else:
                    settings = yaml.safe_load(Path(file).read_bytes()) or {}
                yield card, settings.get("configs")
            except (yaml.YAMLError, AttributeError) as error:
                raise ValueError(f"{card} is not YAML of a card: {error}") from error


def _names(configs: Any) -> Iterator[str]:
    """Every file, pattern and folder that the configs of a card name."""
    if isinstance(configs, str):
        yield configs
    elif isinstance(configs, list):
        for part in configs:
            yield from _names(part)
    elif isinstance(configs, dict):
        for key in ("data_files", "data_dir", "path"):
            yield from _names(configs.get(key))


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raise DataError for what the clients of the hub raise."""
    try:
        yield
    except RekindleError:
        raise
    except Exception as error:  # their HTTP client depends on their version
        fix = "check the name, the config, the network and, for a private one, HF_TOKEN"
        reason = str(error) or repr(error)
        message = f"cannot read `{name}` from the hub: {reason.splitlines()[0]}"
        raise DataError(message, where="data.source", fix=fix) from error
