"""Tensors into and out of the files of a checkpoint, whatever layout wrote them or reads them.

The files are those of torch.distributed.checkpoint (DCP), which plans who writes what and
propagates failures. Ours: hashing while writing, and reading, which checks that everything is
there. DCP pickles its `.metadata`: it is read with an allow-list, the entries of files with
`weights_only`, all of it after the caller has checked hashes."""

import dataclasses
import hashlib
import io
import math
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import _ReaderView
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from rekindle.errors import CheckpointError, RekindleError
from rekindle.spec.heartbeat import beat
from rekindle.train.mesh import Ranks, of_all
from rekindle.train.storage import Storage, write_error

METADATA = ".metadata"
THREADS = max(1, min(4, len(os.sched_getaffinity(0))))
_NICE = 10
_FOREIGN = "rekindle did not write it: find out who did, and remove it"

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor: plain, sharing its memory; where it begins in the whole."""

    local: torch.Tensor
    offsets: torch.Size
    whole: torch.Size

    @property
    def chunk(self) -> meta.ChunkStorageMetadata:
        return meta.ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())

    def __create_write_items__(self, fqn: str, piece: Any) -> list[WriteItem]:
        """DCP's protocol for what is not a tensor of torch's."""
        properties = meta.TensorProperties.create_from_tensor(self.local)
        data = planning.TensorWriteData(chunk=self.chunk, properties=properties, size=self.whole)
        index = meta.MetadataIndex(fqn, self.offsets)
        return [WriteItem(index, planning.WriteItemType.SHARD, tensor_data=data)]


def pieces_of(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Piece]:
    """The pieces of a nested dict of tensors, DTensors or pieces, by dotted name, none empty.
    Raises TypeError for anything else, ValueError for a DTensor whose sum is outstanding."""
    found: dict[str, Piece] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= pieces_of(value, f"{name}.")
        elif isinstance(value, Piece):
            found[name] = value
        elif not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
        elif (piece := _piece_of(name, value.detach())) is not None and piece.local.numel():
            found[name] = piece
    return found


def _piece_of(name: str, tensor: torch.Tensor) -> Piece | None:
    if not isinstance(tensor, DTensor):
        return Piece(tensor, torch.Size([0] * tensor.ndim), tensor.size())
    if tensor.device_mesh.get_coordinate() is None:
        return None
    with torch.no_grad():
        local = tensor.to_local()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if chunk.sizes != local.size():
        raise TypeError(f"{name}: this rank holds {local.size()}, torch places {chunk.sizes} here")
    return Piece(local, chunk.offsets, tensor.size())


class Planner(DefaultSavePlanner):
    """DCP's plan for a dict of pieces: each part once, spread over the ranks that hold it."""

    def lookup_object(self, index: meta.MetadataIndex) -> Any:
        return self.state_dict[index.fqn].local


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a checkpoint, as the manifest lists it; `path` within the checkpoint's folder."""

    path: str
    bytes: int
    sha256: str


class _Hashing(io.RawIOBase):
    """Counts and hashes what is written through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.hash, self.bytes = stream, hashlib.sha256(), 0
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.hash.update(content)
        self.bytes += memoryview(content).nbytes
        try:
            return self.stream.write(content)
        except Exception as error:
            self.error = error
            raise


class Writer(StorageWriter):
    """Writes this rank's part of a checkpoint, `threads` files at a time; lists their hashes."""

    def __init__(self, storage: Storage, folder: str, threads: int) -> None:
        self.storage, self.folder, self.threads = storage, folder, threads
        self.files: list[File] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing outlives one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        total = sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)
        self.storage.check_room(total)
        return [dataclasses.replace(p, storage_data=(rank, total)) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, total = plan.storage_data
        shares: list[list[WriteItem]] = [[] for _ in range(self.threads)]
        items = sorted(plan.items, key=lambda i: i.tensor_storage_size() or 0, reverse=True)
        sizes = [item.tensor_storage_size() or 0 for item in items]
        for item, share in zip(items, _divided(sizes, self.threads), strict=True):
            shares[share].append(item)
        named = [(f"__{rank}_{i}.distcp", share) for i, share in enumerate(shares) if share]
        crc = get_crc32_options()
        set_crc32_options(False)  # it would cost as much as the hash, and hold the GIL
        try:
            with ThreadPoolExecutor(self.threads, initializer=yield_to_training) as pool:
                results = pool.map(lambda one: self._write(one[0], one[1], planner), named)
                written = [result for part in results for result in part]
        except OSError as error:
            raise write_error(error, self.storage.root, total) from None
        except Exception as error:  # of a store's client, which no other rank would unpickle
            if isinstance(error, RekindleError):
                raise
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        finally:
            set_crc32_options(crc)
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _write(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        def produce(stream: BinaryIO) -> tuple[list[WriteResult], File]:
            hashing, results = _Hashing(stream), []
            for item in items:
                start = hashing.bytes
                try:
                    torch.save(planner.resolve_data(item), cast(IO[bytes], hashing))
                except RuntimeError as error:  # of the zip writer, which swallows the stream's own
                    raise hashing.error or error from None
                info = _StorageInfo(name, start, hashing.bytes - start)
                results.append(WriteResult(item.index, info.length, info))
            return results, File(name, hashing.bytes, hashing.hash.hexdigest())

        results, file = self.storage.write(f"{self.folder}/{name}", produce)
        self.files.append(file)
        return results

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for part in results for one in part}
        metadata.storage_meta = meta.StorageMeta(checkpoint_id=f"{self.storage.root}/{self.folder}")
        content = pickle.dumps(metadata)
        try:
            self.storage.write(f"{self.folder}/{METADATA}", lambda stream: stream.write(content))
        except OSError as error:
            raise write_error(error, self.storage.root, len(content)) from None
        self.files.append(File(METADATA, len(content), hashlib.sha256(content).hexdigest()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def yield_to_training() -> None:
    """Let the calling thread run when training leaves a processor idle, and start no others."""
    torch.set_num_threads(1)
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(now, _NICE))


def _memory_format(kind: Any, name: str) -> Any:
    """Python before 3.11.4 stores a member of an enum as `getattr`; metadata has one such enum."""
    if kind is meta._MEM_FORMAT_ENCODING:
        return meta._MEM_FORMAT_ENCODING[name]
    what = f"the checkpoint's metadata takes {name!r} of {kind!r}, which no checkpoint of ours does"
    raise CheckpointError(what, fix=_FOREIGN)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        what = f"the checkpoint's metadata names {module}.{name}, which no checkpoint of ours does"
        raise CheckpointError(what, fix=_FOREIGN)


def read_metadata(content: bytes, files: Iterable[str]) -> meta.Metadata:
    """DCP's metadata, without running what it may contain. Raises CheckpointError for anything that
    `Writer` does not write, such as entries in other files than `files`."""
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ImportError,
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"the checkpoint's metadata cannot be read: {error}") from error
    known = set(files)
    tensors = getattr(metadata, "state_dict_metadata", None)
    entries = getattr(metadata, "storage_data", None)
    if not (
        isinstance(metadata, meta.Metadata)
        and isinstance(tensors, dict)
        and all(isinstance(value, meta.TensorStorageMetadata) for value in tensors.values())
        and isinstance(entries, dict)
        and all(isinstance(e, _StorageInfo) and e.relative_path in known for e in entries.values())
    ):
        raise CheckpointError("the checkpoint's metadata describes more than its tensors")
    return metadata


@dataclasses.dataclass(frozen=True)
class _Read:
    """Copy a part of the entry at `start` of the file `path` into `target`."""

    path: str
    start: int
    bytes: int
    part: tuple[slice, ...]
    target: torch.Tensor


def fill(
    pieces: Mapping[str, Piece],
    metadata: meta.Metadata,
    storage: Storage,
    folder: str,
    replicas: Ranks = None,
) -> None:
    """Fill the pieces in place, reading only what they need. Raises CheckpointError if one of them
    is not there as it is here: nothing has been filled then. `replicas`, ranks with the same
    pieces, all call this: each reads its share and sends it to the others."""
    reads = {name: _plan(name, pieces[name], metadata) for name in sorted(pieces)}
    # which of the ranks reads each piece
    names = sorted(pieces, key=lambda n: (-pieces[n].local.nbytes, n))
    sizes = [pieces[name].local.nbytes for name in names]
    ranks = _divided(sizes, replicas.size() if replicas is not None else 1)
    owners = dict(zip(names, ranks, strict=True))
    me = replicas.rank() if replicas is not None else 0
    by_path: dict[str, list[_Read]] = defaultdict(list)
    for one in (r for name in reads if owners[name] == me for r in reads[name]):
        by_path[one.path].append(one)

    def read(path: str) -> None:
        with storage.reader(f"{folder}/{path}") as stream, torch.no_grad():
            for one in sorted(by_path[path], key=lambda r: r.start):
                # an entry is a file of its own; a copy where the file is not on this machine
                if hasattr(stream, "fileno"):
                    file: Any = _ReaderView(cast(io.IOBase, stream), one.start, one.bytes)
                else:
                    stream.seek(one.start)
                    file = io.BytesIO(stream.read(one.bytes))
                entry = torch.load(file, map_location="cpu", weights_only=True)
                one.target.copy_(entry[one.part])
                beat()

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, by_path))
        failure = None
    except Exception as error:
        failure = error
        if replicas is None:
            raise
    if replicas is not None:
        _agree(failure, replicas)
        with torch.no_grad():
            for name, owner in owners.items():  # from the rank that has read it to the others
                local = pieces[name].local
                whole = local.contiguous()
                dist.broadcast(whole, group=replicas, group_src=owner)
                if whole is not local:
                    local.copy_(whole)
                beat()


def _divided(sizes: Iterable[int], count: int) -> list[int]:
    """Which of `count` parts each size goes to, so that all are about as large; largest first."""
    loads, parts = [0] * count, []
    for size in sizes:
        parts.append(loads.index(min(loads)))
        loads[parts[-1]] += size
    return parts


def _agree(failure: Exception | None, replicas: dist.ProcessGroup) -> None:
    """Raise on all ranks if one of them could not read: the others would wait for it for ever."""
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    failures = of_all(said, replicas)
    if failure is not None:
        raise failure
    if first := next(filter(None, failures), None):
        raise CheckpointError(f"another rank could not read its share: {first}")


def _plan(name: str, piece: Piece, metadata: meta.Metadata) -> list[_Read]:
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, meta.TensorStorageMetadata):
        raise CheckpointError(f"it holds no {name}")
    here = tuple(piece.whole), piece.local.dtype
    there = tuple(saved.size), saved.properties.dtype
    if here != there:
        raise CheckpointError(f"{name} is {there} there and {here} here")
    found, reads = 0, []
    for item in create_read_items_for_chunk_list(name, saved, [piece.chunk]):
        info = metadata.storage_data[item.storage_index]
        part = _slices(item.storage_offsets, item.lengths)
        target = piece.local[_slices(item.dest_offsets, item.lengths)]
        reads.append(_Read(info.relative_path, info.offset, info.length, part, target))
        found += math.prod(item.lengths)
    if found != piece.local.numel():
        what = f"it holds {found} of {piece.local.numel()} values of a part of {name}"
        raise CheckpointError(what)
    return reads


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
