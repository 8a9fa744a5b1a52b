"""The cases of test_checkpoint.py, which need ranks: `python checkpoint_cases.py GROUP FOLDER ROOT`
runs the functions whose name begins with the group, one after the other, on each rank, and leaves
`<rank>.json` in FOLDER: by name "" or what went wrong. Checkpoints go to ROOT, a folder or a URI."""

import contextlib
import json
import os
import pickle
import random
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rekindle.errors import CheckpointError
from rekindle.spec.model import CheckpointSpec
from rekindle.storage import Folder, object_store
from rekindle.train.checkpoint import Checkpointer, agreed, broken, load, newest
from rekindle.train.checkpoint_storage import checkpoint_storage
from rekindle.train.dcp import fill, pieces_of, read_metadata
from rekindle.train.manifest import metadata_of, offers, signed

KEY = "key"
KEEP = CheckpointSpec(keep=2)


def rank():
    return dist.get_rank()


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def settled(checkpointer):
    """Whether the save in flight is committed, asked for by all ranks as the loop does."""
    save, written = checkpointer.pending, torch.tensor(float(checkpointer.written()))
    dist.all_reduce(written, dist.ReduceOp.MIN)
    if written:
        checkpointer.settle(save)
    return bool(written)


def listed(root):
    return sorted(n for n in checkpoint_storage(root).folders() if n.startswith("step-"))


def fill_with(value, tensors):
    return {
        k: fill_with(value, v) if isinstance(v, dict) else torch.full_like(v, value)
        for k, v in tensors.items()
    }


def some(seed, **sizes):
    """A nested dict of plain tensors."""
    made = torch.Generator().manual_seed(seed)
    return {"model": {n: torch.randn(*s, generator=made) for n, s in sizes.items()}}


# ---- four ranks: any layout into any other ------------------------------------------------------


class Net(nn.Module):
    """Sizes that no number of ranks divides: 5, 7, 3 and 9."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 9)
        self.small = nn.Linear(9, 3)
        self.norm = nn.LayerNorm(9)
        with torch.no_grad():
            made = torch.Generator().manual_seed(3)
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=made))


def tensor_parallel(net, mesh):
    """Rows of `up` and `small`, columns of `down`."""
    parallelize_module(
        net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(), "small": ColwiseParallel()}
    )


def one():
    return Net()


def fsdp(ranks):
    def build():
        net = Net()
        if rank() < ranks:
            mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("shard",))
            fully_shard(net, mesh=mesh)
        else:
            DeviceMesh("cpu", list(range(ranks)))  # all ranks take part in making its group
            net = None
        return net

    return build


def hsdp():
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))
    return net


def tp4():
    net = Net()
    tensor_parallel(net, init_device_mesh("cpu", (4,)))
    return net


def fsdp_tp():
    net = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    tensor_parallel(net, mesh["tp"])
    fully_shard(net, mesh=mesh["shard"])
    return net


LAYOUTS = {
    "one": one,
    "fsdp4": fsdp(4),
    "fsdp2": fsdp(2),
    "hsdp": hsdp,
    "tp4": tp4,
    "fsdp_tp": fsdp_tp,
}


def state_of(net):
    """Weights and something like moments, as the loop hands them over."""
    if net is None:
        return {}
    weights = dict(net.named_parameters())
    return {
        "model": weights,
        "optimizer": {f"{n}.exp_avg": p.detach() * 2 for n, p in weights.items()}
        | {f"{n}.step": torch.tensor(7.0) for n in weights},
    }


def right(net):
    """Whether this rank holds its part of the values that Net was made with."""
    whole = dict(Net().named_parameters())
    for name, piece in pieces_of(dict(net.named_parameters())).items():
        part = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.local.shape, strict=True))
        assert torch.equal(piece.local, whole[name][part]), name


@contextlib.contextmanager
def counted_reads():
    """How many bytes this rank reads of files that hold tensors."""
    count, original = [0], Folder.reader

    @contextlib.contextmanager
    def reader(self, path):
        with original(self, path) as stream:

            class Counting:
                seek = stream.seek

                def read(_, size=-1):
                    content = stream.read(size)
                    count[0] += len(content)
                    return content

            yield Counting()

    Folder.reader = reader
    try:
        yield count
    finally:
        Folder.reader = original


def fill_from(root, found, tensors, replicas):
    """As `load` does for tensors on GPUs, or from an object store."""
    storage = checkpoint_storage(root)
    metadata = read_metadata(metadata_of(storage, found), [file.path for file in found.files])
    fill(pieces_of(tensors), metadata, storage, found.name, replicas)


def layouts_replicas_read_every_byte_once_and_get_the_same_bits(root):
    """Four ranks that hold the same, and then two pairs of which each holds half."""
    saved = some(3, **{f"w{i}": (40 + i, 50) for i in range(12)})
    saved["model"]["transposed"] = torch.randn(30, 20, generator=torch.Generator().manual_seed(5)).T
    saver = Checkpointer(root, KEEP, KEY)
    saver.save(1, saved, {})
    saver.wait()
    found = agreed(root, KEY)
    size = sum(file.bytes for file in found.files if file.path.endswith(".distcp"))
    largest = max(t.nbytes for t in saved["model"].values()) + 4096  # and its envelope
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    for group, count in ((dist.group.WORLD, 4), (mesh.get_group("dp"), 2), (None, 1)):
        target = fill_with(0.0, saved)
        target["model"]["transposed"] = torch.zeros(30, 20).T
        with counted_reads() as bytes_read:
            fill_from(root, found, target, group)
        assert all(torch.equal(target["model"][n], t) for n, t in saved["model"].items()), count
        assert size / count - largest <= bytes_read[0] <= size / count + largest, (
            count,
            bytes_read,
        )
        total = torch.tensor(float(bytes_read[0]))
        dist.all_reduce(total)
        assert int(total) == 4 // count * size, (count, int(total), size)


def layouts_a_replica_that_cannot_read_fails_all_of_them(root):
    saved = some(4, a=(3, 4), b=(5, 6), c=(7, 8), d=(9, 10))
    saver = Checkpointer(root, KEEP, KEY)
    saver.save(1, saved, {})
    saver.wait()
    found = agreed(root, KEY)
    original = Folder.reader

    @contextlib.contextmanager
    def torn(self, path):
        raise OSError(5, "Input/output error", path)
        yield

    try:
        if rank() == 2:
            Folder.reader = torn
        error = raised(
            (OSError, CheckpointError), lambda: fill_from(root, found, saved, dist.group.WORLD)
        )
    finally:
        Folder.reader = original
    assert "Input/output error" in str(error)
    assert isinstance(error, CheckpointError) is (rank() != 2)


def layouts_every_layout_loads_what_every_other_saved_bit_for_bit(root):
    saved = {}
    for name, build in LAYOUTS.items():
        net = build()
        if net is not None:
            right(net)
        checkpointer = Checkpointer(f"{root}/{name}", KEEP, KEY)
        checkpointer.save(1, state_of(net), {})
        checkpointer.wait()
        saved[name] = agreed(f"{root}/{name}", KEY)
    for target, build in LAYOUTS.items():
        for source, checkpoint in saved.items():
            net = build()
            if net is None:
                continue
            tensors = state_of(net)
            for group in tensors.values():
                for tensor in group.values():
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    local.data.fill_(-1)
            load(checkpoint, tensors)
            try:
                right(net)
                for name, parameter in net.named_parameters():
                    moment = tensors["optimizer"][f"{name}.exp_avg"]
                    assert torch.equal(local_of(moment), 2 * local_of(parameter)), name
                    assert tensors["optimizer"][f"{name}.step"] == 7
            except AssertionError as error:
                raise AssertionError(f"{source} -> {target}: {error}") from error


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layouts_each_value_is_stored_once(root):
    net = hsdp()
    checkpointer = Checkpointer(root, KEEP, KEY)
    checkpointer.save(1, {"model": dict(net.named_parameters())}, {})
    checkpointer.wait()
    metadata = dcp.FileSystemReader(agreed(root, KEY).folder).read_metadata()
    for name, parameter in Net().named_parameters():
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        assert sum(c.sizes.numel() for c in chunks) == parameter.numel(), name


def layouts_stages_that_hold_different_tensors_save_and_load_their_own(root):
    whole = some(0, a=(3, 4), b=(5,), c=(2, 2))["model"] | {"shared": torch.arange(6.0)}
    mine = (
        {"a": whole["a"], "shared": whole["shared"]}
        if rank() < 2
        else {"b": whole["b"], "c": whole["c"]}
    )
    checkpointer = Checkpointer(root, KEEP, KEY)
    checkpointer.save(4, {"model": mine}, {})
    checkpointer.wait()
    found = agreed(root, KEY)
    again = fill_with(-1, {"model": mine})
    load(found, again)
    assert all(torch.equal(again["model"][n], mine[n]) for n in mine)
    everything = fill_with(-1, {"model": whole})
    load(found, everything)
    assert all(torch.equal(everything["model"][n], whole[n]) for n in whole)
    third = {"model": {"c": torch.zeros(2, 2)}} if rank() == 3 else {"model": {}}
    load(found, third)
    assert rank() != 3 or torch.equal(third["model"]["c"], whole["c"])


def layouts_a_broken_file_is_found_by_all_ranks_and_the_one_before_is_taken(root):
    tensors = some(rank(), **{f"w{rank()}": (50, 50)})
    checkpointer = Checkpointer(root, KEEP, KEY)
    for step in (1, 2):
        checkpointer.save(step, tensors, {})
    checkpointer.wait()
    last = agreed(root, KEY)
    assert last.step == 2
    if rank() == 0:
        flip(next(last.folder.glob("__2_*.distcp")))
    dist.barrier()
    assert agreed(root, KEY).step == 1
    assert "does not match its hash" in broken(last)


def layouts_the_failure_of_one_rank_is_raised_on_all_and_the_next_save_works(root):
    checkpointer = Checkpointer(root, KEEP, KEY)
    tensors = some(rank(), **{f"w{rank()}": (50, 50)})
    checkpointer.save(1, tensors, {})
    checkpointer.wait()
    if rank() == 2:
        folder = Path(root) / f"step-000000002.{checkpointer.attempt}"
        (folder / "__2_0.distcp").mkdir(parents=True)  # a file cannot be made where a folder is
    dist.barrier()
    checkpointer.save(2, tensors, {})
    error = raised(CheckpointError, checkpointer.wait)
    assert "Is a directory" in str(error), error
    assert error.problems[0].where == str(root)
    assert agreed(root, KEY).step == 1
    assert [n[:14] for n in listed(root)] == ["step-000000001"]
    checkpointer.save(3, tensors, {})
    checkpointer.wait()
    assert agreed(root, KEY).step == 3


def layouts_a_folder_that_is_not_shared_by_all_nodes_is_noticed(root):
    checkpointer = Checkpointer(f"{root}/{rank() // 2}", KEEP, KEY)  # two nodes, a disk each
    checkpointer.save(1, some(rank(), **{f"w{rank()}": (50, 50)}), {})
    error = raised(CheckpointError, checkpointer.wait)
    assert "is not the same folder on all nodes" in str(error)
    assert newest(f"{root}/0", KEY) is None


def layouts_ranks_agree_on_what_is_committed_and_on_what_fits(root):
    checkpointer = Checkpointer(root, KEEP, KEY)
    assert checkpointer.fits(0.0), "nothing is known yet"
    tensors = some(rank(), **{f"w{rank()}": (500, 500)})
    checkpointer.save(1, tensors, {})
    deadline = time.monotonic() + 60
    while not settled(checkpointer):
        time.sleep(random.uniform(0, 0.01))  # ranks are never in step
        assert time.monotonic() < deadline
    assert newest(root, KEY).step == 1
    (seconds,) = checkpointer.seconds
    everyone = [None] * 4
    dist.all_gather_object(everyone, seconds)
    assert len(set(everyone)) == 1
    assert checkpointer.fits(seconds * 1.6)
    assert not checkpointer.fits(seconds * 1.4)
    assert not checkpointer.fits(seconds * 1.6 if rank() else 0.0), "one rank alone has no time"
    before = listed(root)
    checkpointer.save(1, tensors, {})
    assert checkpointer.pending is None
    assert listed(root) == before


# ---- one rank, a folder -------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def saved(root, steps=(1,), spec=KEEP, tensors=None, state=lambda step: {}):
    checkpointer = Checkpointer(root, spec, KEY)
    for step in steps:
        checkpointer.save(step, tensors or some(step, w=(20, 30)), state(step))
    checkpointer.wait()
    return checkpointer


def manifest_of(checkpoint):
    return checkpoint.folder / "manifest.json"


def forge(checkpoint, **changes):
    """Change a manifest the way somebody would who knows how it is signed."""
    body = json.loads(manifest_of(checkpoint).read_text()) | changes
    body.pop("sha256")
    manifest_of(checkpoint).write_bytes(signed(body))


def folder_all_kinds_of_tensors_come_back(root):
    made = torch.Generator().manual_seed(1)
    tensors = {
        "a": {"b": {"deep": torch.randn(3, 3, generator=made)}},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "int": torch.arange(7),
        "bool": torch.tensor([True, False]),
        "bf16": torch.randn(5, generator=made).bfloat16(),
        "fp16": torch.randn(5, generator=made).half(),
        "transposed": torch.randn(4, 6, generator=made).t(),
        "slice": torch.randn(9, 9, generator=made)[2:5, ::2],
        "channels_last": torch.randn(2, 3, 4, 4, generator=made).to(
            memory_format=torch.channels_last
        ),
        "empty": torch.zeros(0, 4),
        "parameter": nn.Parameter(torch.randn(3, generator=made)),
        "large": torch.randn(9_000_001, generator=made),
    }
    before = {n: t.detach().clone() for n, t in tensors.items() if n != "a"}
    saved(root, tensors=tensors)
    with torch.no_grad():
        for name in before:
            tensors[name].zero_()
    tensors["a"]["b"]["deep"].zero_()
    load(newest(root, KEY), tensors)
    for name, tensor in before.items():
        assert torch.equal(tensors[name], tensor), name
    assert tensors["a"]["b"]["deep"].abs().sum() > 0


def folder_what_changes_after_the_call_is_not_in_the_checkpoint(root):
    tensors = {"w": torch.ones(2_000_000)}
    checkpointer = Checkpointer(root, KEEP, KEY)
    checkpointer.save(1, tensors, {})
    tensors["w"].fill_(2)
    checkpointer.save(2, tensors, {})
    tensors["w"].fill_(3)
    checkpointer.wait()
    kept = [checkpoint for checkpoint, _ in offers(checkpoint_storage(root), KEY)][::-1]
    assert len(kept) == 2
    for step, checkpoint in enumerate(kept, 1):
        into = {"w": torch.zeros(2_000_000)}
        load(checkpoint, into)
        assert into["w"].unique().tolist() == [step]


def folder_torchs_own_tools_read_it(root):
    tensors = some(5, w=(6, 7), v=(3,))
    saved(root, tensors=tensors)
    into = fill_with(0, tensors)
    dcp.load(into, checkpoint_id=newest(root, KEY).folder)
    assert torch.equal(into["model"]["w"], tensors["model"]["w"])
    assert torch.equal(into["model"]["v"], tensors["model"]["v"])


def folder_a_malicious_metadata_does_not_run_even_if_its_hash_is_right(root):
    saved(root)
    checkpoint = newest(root, KEY)
    mark = Path(root) / "executed"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {mark}",)

    import hashlib

    content = pickle.dumps(Evil())
    (checkpoint.folder / ".metadata").write_bytes(content)
    assert newest(root, KEY) is None, "its hash is wrong"
    files = json.loads(manifest_of(checkpoint).read_text())["files"]
    for entry in files:
        if entry["path"] == ".metadata":
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(checkpoint, files=files)
    forged = newest(root, KEY)
    assert forged is not None
    error = raised(CheckpointError, lambda: load(forged, some(1, w=(20, 30))))
    assert "names posix.system, which no checkpoint of ours does" in str(error)
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "it would have run"


def folder_metadata_that_points_elsewhere_or_at_pickles_is_refused(root):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    from rekindle.train.dcp import read_metadata

    saved(root)
    folder = newest(root, KEY).folder
    metadata = dcp.FileSystemReader(folder).read_metadata()
    names = [p.name for p in folder.glob("*.distcp")]
    read_metadata(pickle.dumps(metadata), names)
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"
    error = raised(CheckpointError, lambda: read_metadata(pickle.dumps(metadata), names))
    assert "describes more than its tensors" in str(error)
    metadata.state_dict_metadata["w"] = BytesStorageMetadata()
    error = raised(CheckpointError, lambda: read_metadata(pickle.dumps(metadata), names))
    assert "BytesStorageMetadata" in str(error)
    raised(CheckpointError, lambda: read_metadata(b"\x80\x04garbage", names))


def folder_metadata_of_any_python_3_11_is_read(root):
    """Before 3.11.4 members of enums were stored as attributes of their class."""
    import io
    from enum import Enum

    from rekindle.train.dcp import read_metadata

    class Early(pickle.Pickler):
        def reducer_override(self, obj):
            if isinstance(obj, Enum):
                return getattr, (type(obj), obj.name)
            return (getattr, (type(obj), name)) if (name := taken.get(id(obj))) else NotImplemented

    def stored(obj):
        Early(stream := io.BytesIO()).dump(obj)
        return stream.getvalue()

    taken = {}
    saved(root)
    folder = newest(root, KEY).folder
    metadata = dcp.FileSystemReader(folder).read_metadata()
    names = [p.name for p in folder.glob("*.distcp")]
    content = stored(metadata)
    assert b"getattr" in content
    assert read_metadata(content, names) == metadata
    taken[id(metadata)] = "__init__"
    error = raised(CheckpointError, lambda: read_metadata(stored(metadata), names))
    assert "takes '__init__' of" in str(error)


def folder_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(root):
    saved(root, tensors={"w": torch.ones(4, 4), "v": torch.ones(2)})
    checkpoint = newest(root, KEY)
    for into, words in (
        (
            {"v": torch.zeros(2), "w": torch.zeros(4, 5)},
            "w is ((4, 4), torch.float32) there and ((4, 5), torch.float32) here",
        ),
        ({"v": torch.zeros(2), "w": torch.zeros(4, 4).half()}, "torch.float16"),
        ({"v": torch.zeros(2), "x": torch.zeros(4)}, "it holds no x"),
    ):
        error = raised(CheckpointError, lambda into=into: load(checkpoint, into))
        assert words in str(error), error
        assert not into["v"].any()
    raised(TypeError, lambda: pieces_of({"step": 3}))


def folder_a_broken_one_falls_back_loudly_and_none_left_starts_over(root):
    saved(root, steps=(1, 2, 3), spec=CheckpointSpec(keep=3))
    ruin = [
        lambda c: flip(next(c.folder.glob("*.distcp"))),
        lambda c: next(c.folder.glob("*.distcp")).unlink(),
        lambda c: manifest_of(c).write_text(manifest_of(c).read_text()[:-40]),
    ]
    said = [
        "does not match its hash",
        "is missing or has another size",
        "manifest.json cannot be read",
    ]
    for step, (break_it, words) in enumerate(zip(ruin, said, strict=True)):
        checkpoint = newest(root, KEY)
        assert checkpoint.step == 3 - step
        break_it(checkpoint)
        LOG.clear()
        newest(root, KEY)
        assert any(f"{checkpoint.name} is broken ({words}" in m or words in m for m in LOG), LOG
    LOG.clear()
    assert newest(root, KEY) is None
    assert any("training starts over" in message for message in LOG)


def folder_an_altered_manifest_is_broken(root):
    saved(root, steps=(1, 2))
    checkpoint = newest(root, KEY)
    text = manifest_of(checkpoint).read_text()
    manifest_of(checkpoint).write_text(text.replace('"step": 2', '"step": 1'))
    assert newest(root, KEY).step == 1


def folder_another_run_key_or_schema_is_refused(root):
    saved(root)
    error = raised(CheckpointError, lambda: newest(root, "other"))
    assert "is of the run key key, not of other" in str(error)
    raised(CheckpointError, lambda: agreed(root, "other"))
    forge(newest(root, KEY), schema_version=99)
    error = raised(CheckpointError, lambda: newest(root, KEY))
    assert "has schema 99" in str(error)


def folder_a_save_cut_off_before_its_commit_counts_for_nothing_and_goes_with_the_next(root):
    saved(root, steps=(1, 2))
    half = Path(root) / "step-000000003.deadbeef"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert newest(root, KEY).step == 2
    saved(root, steps=(3,))
    assert not half.exists()
    assert newest(root, KEY).step == 3


def folder_a_broken_later_step_of_an_earlier_attempt_makes_room(root):
    saved(root, steps=(1, 2))
    last = newest(root, KEY)
    flip(next(last.folder.glob("*.distcp")))
    saved(root, steps=(2,))
    assert newest(root, KEY).step == 2
    assert [n[:14] for n in listed(root)] == ["step-000000001", "step-000000002"]
    assert last.name not in listed(root)


def folder_state_and_scalars_come_back_as_they_were(root):
    state = {
        "step": 1,
        "world_size": 2,
        "scale": 65536.0,
        "nan": float("nan"),
        "nested": {"a": [1, 2]},
    }
    saved(root, state=lambda step: state)
    found = newest(root, KEY)
    assert found.state["nested"] == {"a": [1, 2]}
    assert found.state["nan"] != found.state["nan"]
    assert (found.state["scale"], found.step, found.root) == (65536.0, 1, str(root))


def folder_retention_keeps_the_newest_the_best_and_one_a_span(root):
    losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 3.0, 5: 4.0, 6: 4.5, 7: 2.0}
    saved(
        root,
        steps=losses,
        spec=CheckpointSpec(keep=2, keep_best=True, keep_every_hours=0.5),
        state=lambda step: {"validation_loss": losses[step], "train_seconds": step * 700.0},
    )
    # spans of 1800 s: steps 1-2, 3-5, 6-7
    assert [int(n[5:14]) for n in listed(root)] == [2, 5, 6, 7]


# ---- a small disk -------------------------------------------------------------------------------


def full_a_checkpoint_that_does_not_fit_says_what_it_needs_and_the_one_before_stays(root):
    tensors = {"w": torch.ones(500_000)}
    checkpointer = saved(root, tensors=tensors)
    large = {"w": torch.ones(3_000_000)}
    checkpointer.save(2, large, {})
    error = raised(CheckpointError, checkpointer.wait)
    assert "No space left on device" in str(error)
    assert re.search("needs 12,000,000 bytes, [0-9,]+ are free", str(error)), error
    assert error.problems[0].where == str(root)
    assert newest(root, KEY).step == 1
    checkpointer.save(3, tensors, {})
    checkpointer.wait()
    assert newest(root, KEY).step == 3


def full_a_disk_that_fills_up_during_the_save_is_the_same_error(root):
    tensors = {"w": torch.ones(1_000_000)}
    checkpointer = saved(root, tensors={"w": torch.ones(100_000)})
    checkpointer.storage.check_room = lambda needed: (
        None
    )  # another process took the room just after
    ballast = Path(root) / "ballast"
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    ballast.write_bytes(b"x" * (free - 2_000_000))
    checkpointer.save(2, tensors, {})
    error = raised(CheckpointError, checkpointer.wait)
    assert "No space left on device" in str(error), error
    assert "needs 4,000,000 bytes" in str(error)
    assert [n[:14] for n in listed(root)] == ["step-000000001"], "what was half written is gone"
    assert newest(root, KEY).step == 1


# ---- an object store ----------------------------------------------------------------------------


def store_saves_resumes_and_forgets_like_a_folder(root):
    curve = Path(os.environ["CASES"]) / f"history-{rank()}.jsonl"
    tensors = some(rank(), **{f"w{rank()}": (700, 1000)})
    checkpointer = Checkpointer(root, KEEP, KEY, history=curve)
    for step in (1, 2, 3):
        if rank() == 0:
            with curve.open("a") as file:
                file.write(f'{{"step": {step}}}\n')
        checkpointer.save(step, tensors, {"at": step})
    if rank() == 0:
        with curve.open("a") as file:
            file.write('{"step": 4}\n')
    checkpointer.wait()
    assert [int(n[5:14]) for n in listed(root)] == [2, 3]
    found = agreed(root, KEY)
    assert (found.step, found.state) == (3, {"at": 3})
    assert [json.loads(line)["step"] for line in found.history().splitlines()] == [1, 2, 3]
    into = fill_with(0, tensors)
    load(found, into)
    assert torch.equal(into["model"][f"w{rank()}"], tensors["model"][f"w{rank()}"])


def store_a_broken_object_falls_back(root):
    tensors = some(rank(), **{f"w{rank()}": (70, 100)})
    checkpointer = Checkpointer(root, KEEP, KEY)
    for step in (1, 2):
        checkpointer.save(step, tensors, {})
    checkpointer.wait()
    last = agreed(root, KEY)
    if rank() == 0:
        path = f"{last.name}/__1_0.distcp"
        content = bytearray(checkpoint_storage(root).read(path))
        content[99] ^= 1
        checkpoint_storage(root).write(path, lambda stream: stream.write(bytes(content)))
    dist.barrier()
    assert agreed(root, KEY).step == 1


def store_a_manifest_is_put_once(root):
    if rank() == 0:
        there = checkpoint_storage(root)
        there.put_new("step-000000001.deadbeef/manifest.json", b"one")
        there.put_new("step-000000001.deadbeef/manifest.json", b"one")  # a repeated request
        error = raised(
            CheckpointError, lambda: there.put_new("step-000000001.deadbeef/manifest.json", b"two")
        )
        assert "was written by another attempt" in str(error)
        assert there.read("step-000000001.deadbeef/manifest.json") == b"one"
    dist.barrier()


def store_what_another_attempt_is_writing_is_left_alone(root):
    name = "step-000000009.deadbeef"
    if rank() == 0:
        checkpoint_storage(root).write(f"{name}/__0_0.distcp", lambda stream: stream.write(b"half"))
    dist.barrier()
    checkpointer = saved(root, steps=(1, 2, 3))
    assert name in listed(root)
    dist.barrier()
    object_store.DEAD_AFTER *= 0
    checkpointer.save(4, some(0, w=(2, 2)), {})
    checkpointer.wait()
    dist.barrier()
    assert name not in listed(root)
    assert agreed(root, KEY).step == 4


def lost_a_store_that_goes_away_ends_in_an_error_that_names_it_on_every_rank(root):
    object_store.PAUSES_SECONDS = (0.1, 0.2)
    checkpointer = saved(root, steps=(1,))
    if rank() == 0:
        os.kill(int(os.environ["STORE_PID"]), signal.SIGKILL)
    dist.barrier()
    began = time.monotonic()
    checkpointer.save(2, some(2, w=(20, 30)), {})
    assert time.monotonic() - began < 2, "the call waits for nothing"

    def poll():
        while not settled(checkpointer):
            assert time.monotonic() - began < 120
            time.sleep(0.05)

    error = raised(CheckpointError, poll)
    assert f"the checkpoint store {root} cannot be used" in str(error), error
    print("gave up after", time.monotonic() - began, flush=True)
    raised(CheckpointError, lambda: agreed(root, KEY))


# ---- killed while saving ------------------------------------------------------------------------


def endless_saves_until_it_is_killed(root):
    checkpointer = Checkpointer(root, KEEP, KEY)
    tensors = {"w": torch.zeros(2_000_000), "v": torch.zeros(2_000_000)}
    step = newest(root, KEY).step if newest(root, KEY) else 0
    while True:
        step += 1
        for tensor in tensors.values():
            tensor.fill_(step)
        checkpointer.save(step, tensors, {"step": step})
        while not settled(checkpointer):
            time.sleep(0.002)


class Heard:
    """What was logged."""

    def write(self, text):
        LOG.append(text)

    def flush(self):
        pass


LOG: list[str] = []


def main():
    import logging

    logging.basicConfig(level=logging.INFO, stream=Heard())
    group, folder, root = sys.argv[1:]
    os.environ["CASES"] = folder
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    results = {}
    for name, case in list(globals().items()):
        if name.startswith(f"{group}_"):
            began = time.monotonic()
            place = root if group == "full" else f"{root}/{name}"
            try:
                case(place)
                results[name] = ""
            except BaseException:  # noqa: BLE001 - the test reports whatever it was
                results[name] = traceback.format_exc() + "".join(LOG)
            print(name, round(time.monotonic() - began, 2), flush=True)
            Path(folder, f"{rank()}.json").write_text(json.dumps(results))
            dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit


if __name__ == "__main__":
    main()
