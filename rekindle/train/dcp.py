"""Tensors into and out of the files of a checkpoint, whatever layout wrote them or reads
them.

The files are those of torch.distributed.checkpoint (DCP), which plans who writes what and
propagates failures. Ours: hashing while writing, and reading, which checks that
everything is there. DCP pickles its `.metadata`: it is read with an allow-list, the
entries of files with `weights_only`, all of it after the caller has checked hashes."""

import dataclasses
import hashlib
import io
import itertools
import math
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
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
from rekindle.storage import Storage
from rekindle.train.mesh import Ranks, of_all

METADATA = ".metadata"
THREADS = max(1, min(4, len(os.sched_getaffinity(0))))
_NICE = 10  # of threads that save while training computes
_FOREIGN = "rekindle did not write it: find out who did, and remove it"

_DCP = "torch.distributed.checkpoint"
# all that DCP's metadata names; to unpickle anything else would run what a stranger wrote
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
    """What this rank holds of a tensor."""

    local: torch.Tensor
    """Plain, sharing the tensor's memory."""
    offsets: torch.Size
    """Where it begins in the whole."""
    whole: torch.Size
    """The size of the whole."""

    @property
    def chunk(self) -> meta.ChunkStorageMetadata:
        """Its place, as DCP says it."""
        return meta.ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())

    def __create_write_items__(self, fqn: str, piece: Any) -> list[WriteItem]:
        """DCP's protocol for what is not a tensor of torch's."""
        properties = meta.TensorProperties.create_from_tensor(self.local)
        data = planning.TensorWriteData(chunk=self.chunk, properties=properties, size=self.whole)
        index = meta.MetadataIndex(fqn, self.offsets)
        return [WriteItem(index, planning.WriteItemType.SHARD, tensor_data=data)]


def pieces_of(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Piece]:
    """The pieces of a nested dict of tensors, DTensors or pieces, by dotted name, none
    empty.

    Raises TypeError for anything else, ValueError for a DTensor whose sum is
    outstanding."""
    pieces: dict[str, Piece] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pieces |= pieces_of(value, f"{name}.")
        elif isinstance(value, Piece):
            pieces[name] = value
        elif isinstance(value, torch.Tensor):
            piece = _piece_of(name, value.detach())
            if piece is not None and piece.local.numel():
                pieces[name] = piece
        else:
            raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    return pieces


def _piece_of(name: str, tensor: torch.Tensor) -> Piece | None:
    """This rank's piece of a tensor; None where it has no part in it."""
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
        self.stream = stream
        self.hash = hashlib.sha256()
        self.bytes = 0
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


class CheckpointWriter(StorageWriter):
    """Writes this rank's part of a checkpoint, `threads` files at a time; lists their hashes."""

    def __init__(self, storage: Storage, folder: str, threads: int) -> None:
        self.storage = storage
        self.folder = folder
        self.threads = threads
        self.files: list[File] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing outlives one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        total = 0
        for plan in plans:
            total += sum(map(_bytes_of, plan.items))
        self.storage.check_room(total)
        plans_with_total = []
        for rank, plan in enumerate(plans):
            plans_with_total.append(dataclasses.replace(plan, storage_data=(rank, total)))
        return plans_with_total

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, total = plan.storage_data
        items_of_files = self._divide(plan.items, rank)

        def write(name: str) -> list[WriteResult]:
            return self._write(name, items_of_files[name], planner, total)

        crc = get_crc32_options()
        set_crc32_options(False)  # it would cost as much as the hash, and hold the GIL
        results: list[WriteResult] = []
        try:
            with ThreadPoolExecutor(self.threads, initializer=yield_to_training) as pool:
                for results_of_file in pool.map(write, items_of_files):
                    results += results_of_file
        except Exception as error:  # of a store's client, which no other rank would unpickle
            if isinstance(error, RekindleError):
                raise
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        finally:
            set_crc32_options(crc)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _divide(self, items: list[WriteItem], rank: int) -> dict[str, list[WriteItem]]:
        """The items by the file that each goes into: as many files as threads, about as large."""
        ordered = sorted(items, key=_bytes_of, reverse=True)
        shares: list[list[WriteItem]] = [[] for _ in range(self.threads)]
        places = _divided([_bytes_of(item) for item in ordered], self.threads)
        for item, place in zip(ordered, places, strict=True):
            shares[place].append(item)
        return {f"__{rank}_{i}.distcp": share for i, share in enumerate(shares) if share}

    def _write(
        self, name: str, items: list[WriteItem], planner: SavePlanner, total_bytes: int
    ) -> list[WriteResult]:
        def produce(stream: BinaryIO) -> tuple[list[WriteResult], File]:
            hashing = _Hashing(stream)
            results = []
            for item in items:
                start = hashing.bytes
                try:
                    torch.save(planner.resolve_data(item), cast(IO[bytes], hashing))
                except RuntimeError as error:  # of the zip writer, which swallows the stream's own
                    raise hashing.error or error from None
                info = _StorageInfo(name, start, hashing.bytes - start)
                results.append(WriteResult(item.index, info.length, info))
            return results, File(name, hashing.bytes, hashing.hash.hexdigest())

        results, file = self.storage.write(f"{self.folder}/{name}", produce, total_bytes)
        self.files.append(file)
        return results

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {}
        for results_of_rank in results:
            for result in results_of_rank:
                metadata.storage_data[result.index] = result.storage_data
        metadata.storage_meta = meta.StorageMeta(checkpoint_id=f"{self.storage.root}/{self.folder}")
        content = pickle.dumps(metadata)
        path = f"{self.folder}/{METADATA}"
        self.storage.write(path, lambda stream: stream.write(content), len(content))
        self.files.append(File(METADATA, len(content), hashlib.sha256(content).hexdigest()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _bytes_of(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0


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
    message = f"the checkpoint's metadata takes {name!r} of {kind!r}, "
    raise CheckpointError(f"{message}which no checkpoint of ours does", fix=_FOREIGN)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        message = f"the checkpoint's metadata names {module}.{name}, "
        raise CheckpointError(f"{message}which no checkpoint of ours does", fix=_FOREIGN)


def read_metadata(content: bytes, files: Iterable[str]) -> meta.Metadata:
    """DCP's metadata, without running what it may contain.

    Raises CheckpointError for anything that `CheckpointWriter` does not write, such as
    entries in other files than `files`."""
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
    if not _describes_tensors(metadata, set(files)):
        raise CheckpointError("the checkpoint's metadata describes more than its tensors")
    return cast(meta.Metadata, metadata)


def _describes_tensors(metadata: object, files: Set[str]) -> bool:
    """Whether DCP's metadata has the types that it should, of tensors in these files alone."""
    tensors = getattr(metadata, "state_dict_metadata", None)
    entries = getattr(metadata, "storage_data", None)
    if not (isinstance(metadata, meta.Metadata) and isinstance(tensors, dict)):
        return False
    if not all(isinstance(tensor, meta.TensorStorageMetadata) for tensor in tensors.values()):
        return False
    if not isinstance(entries, dict):
        return False
    for entry in entries.values():
        # a file beyond those that were hashed could hold anything
        if not isinstance(entry, _StorageInfo) or entry.relative_path not in files:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class _Read:
    """Copy a part of an entry of a file into a tensor."""

    path: str
    start: int
    """Where the entry begins in the file."""
    bytes: int
    """Of the entry."""
    part: tuple[slice, ...]
    """Of the tensor in it."""
    target: torch.Tensor

    def carry_out(self, stream: BinaryIO) -> None:
        """Read the entry from its file, and copy the part."""
        # an entry is a file of its own; a copy where the file is not on this machine
        if hasattr(stream, "fileno"):
            file: Any = _ReaderView(cast(io.IOBase, stream), self.start, self.bytes)
        else:
            stream.seek(self.start)
            file = io.BytesIO(stream.read(self.bytes))
        entry = torch.load(file, map_location="cpu", weights_only=True)
        self.target.copy_(entry[self.part])


def fill(
    pieces: Mapping[str, Piece],
    metadata: meta.Metadata,
    storage: Storage,
    folder: str,
    replicas: Ranks = None,
) -> None:
    """Fill the pieces in place, reading only what they need.

    Raises CheckpointError if one of them is not there as it is here: nothing has been
    filled then. `replicas`, ranks with the same pieces, all call this: each reads its
    share and sends it to the others."""
    reads = {name: _plan(name, pieces[name], metadata) for name in sorted(pieces)}
    if replicas is None:
        _carry_out(itertools.chain.from_iterable(reads.values()), storage, folder)
        return
    owners = _owners(pieces, replicas.size())
    reads_of_this_rank: list[_Read] = []
    for name, reads_of_piece in reads.items():
        if owners[name] == replicas.rank():
            reads_of_this_rank += reads_of_piece
    failure: Exception | None = None
    try:
        _carry_out(reads_of_this_rank, storage, folder)
    except Exception as error:  # noqa: BLE001 - told to the others, and raised below
        failure = error
    _agree(failure, replicas)
    _send_to_replicas(pieces, owners, replicas)


def _owners(pieces: Mapping[str, Piece], ranks: int) -> dict[str, int]:
    """Which of the ranks reads each piece; the largest ones are dealt first."""
    names = sorted(pieces, key=lambda name: (-pieces[name].local.nbytes, name))
    sizes = [pieces[name].local.nbytes for name in names]
    return dict(zip(names, _divided(sizes, ranks), strict=True))


def _carry_out(reads: Iterable[_Read], storage: Storage, folder: str) -> None:
    """Read file by file, in threads, each from its beginning to its end."""
    reads_of_file: dict[str, list[_Read]] = defaultdict(list)
    for entry in reads:
        reads_of_file[entry.path].append(entry)

    def read_file(path: str) -> None:
        with storage.reader(f"{folder}/{path}") as stream, torch.no_grad():
            for entry in sorted(reads_of_file[path], key=lambda entry: entry.start):
                entry.carry_out(stream)
                beat()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read_file, reads_of_file))


def _send_to_replicas(
    pieces: Mapping[str, Piece], owners: Mapping[str, int], replicas: dist.ProcessGroup
) -> None:
    """Each piece from the rank that has read it to the others."""
    with torch.no_grad():
        for name, owner in owners.items():
            local = pieces[name].local
            whole = local.contiguous()
            dist.broadcast(whole, group=replicas, group_src=owner)
            if whole is not local:
                local.copy_(whole)
            beat()


def _divided(sizes: Iterable[int], count: int) -> list[int]:
    """Which of `count` parts each size goes to, so that all are about as large; largest first."""
    loads = [0] * count
    parts = []
    for size in sizes:
        parts.append(loads.index(min(loads)))
        loads[parts[-1]] += size
    return parts


def _agree(failure: Exception | None, replicas: dist.ProcessGroup) -> None:
    """Raise on all ranks if one of them could not read: the others would wait for it for ever."""
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    messages = of_all(message, replicas)
    if failure is not None:
        raise failure
    for message_of_rank in messages:
        if message_of_rank:
            raise CheckpointError(f"another rank could not read its share: {message_of_rank}")


def _plan(name: str, piece: Piece, metadata: meta.Metadata) -> list[_Read]:
    """What has to be read for a piece; CheckpointError where it is not there as it is here."""
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, meta.TensorStorageMetadata):
        raise CheckpointError(f"it holds no {name}")
    trained_form = tuple(piece.whole), piece.local.dtype
    saved_form = tuple(saved.size), saved.properties.dtype
    if trained_form != saved_form:
        raise CheckpointError(f"{name} is {saved_form} there and {trained_form} here")
    values = 0
    reads = []
    for item in create_read_items_for_chunk_list(name, saved, [piece.chunk]):
        info = metadata.storage_data[item.storage_index]
        part = _slices(item.storage_offsets, item.lengths)
        target = piece.local[_slices(item.dest_offsets, item.lengths)]
        reads.append(_Read(info.relative_path, info.offset, info.length, part, target))
        values += math.prod(item.lengths)
    if values != piece.local.numel():
        raise CheckpointError(
            f"it holds {values} of {piece.local.numel()} values of a part of {name}"
        )
    return reads


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    slices = []
    for offset, length in zip(offsets, lengths, strict=True):
        slices.append(slice(offset, offset + length))
    return tuple(slices)
