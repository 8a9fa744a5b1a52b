"""Tensor parallelism: which matrices of a block are divided how (Shoeybi et al. 2019,
arXiv 1909.08053), and where the architecture allows it the residual stream between them
along the sequence (Korthikanti et al. 2022, arXiv 2205.05198); of language models the
vocabulary, too.

Parameters are DTensors, so that loading, saving and FSDP know of the whole; products are
of local tensors with collectives between them, because a DTensor's operations cost the
host 0.1 ms or more. Shapes: B rows, T tokens, H hidden."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from rekindle.errors import UnsupportedError
from rekindle.families import Modules
from rekindle.objectives.shards import intervals
from rekindle.train import modules
from rekindle.train.mesh import Mesh
from rekindle.train.modules import Skip

_ops = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class TensorPeers:
    """The tp ranks."""

    mesh: DeviceMesh
    group: str
    """The name of their process group, because that is what a compiled graph can hold."""
    size: int
    sequence: bool
    """Whether the residual stream between blocks is divided among them."""

    def enter(self, stream: Tensor) -> Tensor:
        """The stream, [B, T, H], whole for every peer's columns; gradients come back as shares."""
        if self.sequence:
            return self._turned(stream, "joined", "summed part")
        return self._turned(stream, "same", "sum")

    def leave(self, share: Tensor) -> Tensor:
        """Back to the stream: the sum over peers, whole, or divided to [B, T / size, H]."""
        if self.sequence:
            return self._turned(share, "summed part", "joined")
        return self._turned(share, "sum", "same")

    def _turned(self, x: Tensor, forward: str, backward: str) -> Tensor:
        return _Turn.apply(x, forward, backward, self.group, self.size)  # type: ignore[no-untyped-call,no-any-return]


class ColumnLinear(nn.Linear):
    """Has some of the outputs; takes a whole input, whose gradient is a share."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else _local(self.bias)
        return F.linear(input, _local(self.weight), bias)


class GatheredLinear(ColumnLinear):
    """The same, from whole to whole: peers put their outputs together."""

    peers: TensorPeers

    def forward(self, input: Tensor) -> Tensor:
        own_outputs = super().forward(self.peers.enter(input))
        low, high = intervals(self.weight)[0]
        # zeros where other peers have outputs: the sum puts all together
        return self.peers.leave(F.pad(own_outputs, (low, len(self.weight) - high)))


class RowLinear(nn.Linear):
    """Has the weights of some of the inputs, takes those, and returns the stream."""

    peers: TensorPeers

    def forward(self, input: Tensor) -> Tensor:
        out = self.peers.leave(F.linear(input, _local(self.weight)))
        if self.bias is None:
            return out
        # a peer that adds it to its own tokens only sees a share of the gradient
        return out + _local(self.bias, Partial() if self.peers.sequence else Replicate())


class RowEmbedding(nn.Embedding):
    """Has some rows of the table, looks those up, and returns the stream."""

    peers: TensorPeers

    def forward(self, input: Tensor) -> Tensor:
        low, high = intervals(self.weight)[0]
        elsewhere = (input < low) | (input >= high)
        table = _local(self.weight)
        if low == high:  # more peers than rows: of an empty table nothing can be looked up
            return self.peers.leave(table.new_zeros((*input.shape, table.shape[1])) + table.sum())
        padding = None
        if self.padding_idx is not None and low <= self.padding_idx < high:
            padding = self.padding_idx - low
        rows = F.embedding((input - low).masked_fill(elsewhere, 0), table, padding)
        return self.peers.leave(rows.masked_fill(elsewhere[..., None], 0))


def _local(parameter: Tensor, slope: Placement | None = None) -> Tensor:
    """This rank's part; `slope` says what its gradient is of the whole one."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=None if slope is None else [slope])


def along_sequence(network: nn.Module, tokens: bool) -> bool:
    """Whether tp ranks divide the residual stream along the sequence, too."""
    return tokens and bool(_known(network).sequence)


def divide(network: nn.Module, whole: nn.Module, mesh: Mesh, tokens: bool) -> None:
    """Divide the matrices of blocks, and a vocabulary; `network` is `whole`, or a stage of it."""
    sequence = not isinstance(network, nn.Sequential) and along_sequence(network, tokens)
    group = mesh.group("tp")
    assert group is not None
    peers = TensorPeers(mesh.over("tp"), str(group.group_name), mesh.layout.tp, sequence)
    if isinstance(network, nn.Sequential):
        _divide_layers(network, whole, peers)
        return
    known = _known(network)
    for _, block in modules.blocks(network):
        if not isinstance(block, Skip):
            _divide_block(block, known, peers)
    if tokens:
        _divide_vocabulary(network, known, peers)


def shared_by_share(network: nn.Module, tokens: bool) -> frozenset[str]:
    """Parameters that every tp rank holds whole, but of whose gradient it has a share."""
    if isinstance(network, nn.Sequential):
        return frozenset()
    known = _known(network)
    is_along_sequence = along_sequence(network, tokens)
    names = list(known.per_head)
    names += [f"{column}.lora_A.default" for column in known.column]
    if is_along_sequence:  # what follows a row-divided matrix sees this rank's tokens only
        names += known.sequence
        names += [f"{row}.lora_B.default" for row in known.row]
    modules_with_shares = set[str]()
    for block, _ in modules.blocks(network):
        modules_with_shares.update(f"{block}.{name}" for name in names)
    if is_along_sequence:
        backbone = modules.backbone(network)
        body = next(name for name, module in network.named_modules() if module is backbone)
        modules_with_shares.update(f"{body}.{name}" for name in known.last)
    parameters = [name for name, _ in network.named_parameters()]
    return frozenset(name for name in parameters if name.rpartition(".")[0] in modules_with_shares)


def _known(network: nn.Module) -> Modules:
    return modules.required(network, "tensor-parallel")


def _divide_layers(network: nn.Sequential, whole: nn.Module, peers: TensorPeers) -> None:
    """A network of layers, such as the CNN: linear ones but the last are divided, and gathered."""
    names = [name for name, layer in whole.named_modules() if isinstance(layer, nn.Linear)]
    if len(names) < 2:
        message = f"there is no matrix to divide in {modules.model_type(network)}"
        raise UnsupportedError(message, where="train.layout.tp", fix="use dp, or shard")
    for name in names[:-1]:
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Linear):  # not another stage's
            _become(GatheredLinear, layer, peers, Shard(0), Shard(0))


def _divide_block(block: nn.Module, known: Modules, peers: TensorPeers) -> None:
    """Divide the matrices of a block, and have what they take come in whole."""
    for name in known.column:
        for layer in _matrices(block.get_submodule(name), "lora_B"):
            _become(ColumnLinear, layer, peers, Shard(0), Shard(0))
    for name in known.row:
        for layer in _matrices(block.get_submodule(name), "lora_A"):
            _become(RowLinear, layer, peers, Shard(1), Replicate())
    for name in known.regions:
        enter: Any = functools.partial(_entering, peers)
        block.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)


def _matrices(layer: nn.Module, side: str) -> list[nn.Module]:
    """A linear layer; with an adapter its base, and the adapter's matrix on the divided side."""
    if not hasattr(layer, "base_layer"):
        return [layer]
    return [layer.get_submodule("base_layer"), layer.get_submodule(f"{side}.default")]


def _divide_vocabulary(network: nn.Module, known: Modules, peers: TensorPeers) -> None:
    """Token embedding, output layer and the way to it, as far as this stage has them."""
    body = modules.backbone(network)
    table = getattr(body, known.table, None)
    head = network.get_output_embeddings()  # type: ignore[operator]
    if isinstance(table, nn.Embedding):
        _become(RowEmbedding, table, peers, Shard(0))
    if isinstance(head, nn.Linear):
        _become(ColumnLinear, head, peers, Shard(0), Shard(0))
        if isinstance(table, nn.Embedding) and modules.tied(network):
            head.weight = table.weight
    norm = getattr(body, known.last[0], None)
    if peers.sequence and norm is not None and not isinstance(norm, Skip):
        norm.register_forward_hook(lambda module, args, stream: peers.enter(stream))


def _become(
    kind: type[nn.Module], module: nn.Module, peers: TensorPeers, *placements: Placement
) -> None:
    """Make `module` one of `kind`, with weight and bias divided."""
    module.__class__ = kind  # name, parameters and the hooks of others stay as they are
    module.peers = peers  # type: ignore[assignment]
    for name, placement in zip(("weight", "bias"), placements, strict=False):
        parameter = getattr(module, name)
        if parameter is not None:
            divided = distribute_tensor(parameter, peers.mesh, [placement])
            module.register_parameter(name, nn.Parameter(divided, parameter.requires_grad))


def _entering(
    peers: TensorPeers, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The arguments of a module, with the stream whole."""
    if args:
        return (peers.enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": peers.enter(kwargs["hidden_states"])}


# Collectives that gradients pass through. A tensor is whole (each peer has all of it), a
# share (the peers' add up to it), or divided along its second dimension. Where a whole
# tensor feeds divided matrices, its gradient comes back as shares; each function turns
# one kind into another, and gradients back. `group` is a process group's name, because
# that is what a compiled graph can hold.


class _Turn(torch.autograd.Function):
    """One way of `_WAYS` forward, another one for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str, way_back: str, group: str, size: int) -> Tensor:
        ctx.way_back = way_back
        ctx.group = group
        ctx.size = size
        return _WAYS[way](x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _WAYS[ctx.way_back](grad, ctx.group, ctx.size), None, None, None, None


def _same(x: Tensor, group: str, size: int) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: str, size: int) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))  # type: ignore[no-any-return]


def _joined(x_BTH: Tensor, group: str, size: int) -> Tensor:
    by_peer = _ops.wait_tensor(_ops.all_gather_into_tensor(x_BTH.contiguous(), size, group))
    return torch.unflatten(by_peer, 0, (size, -1)).transpose(0, 1).flatten(1, 2)


def _summed_part(x_BTH: Tensor, group: str, size: int) -> Tensor:
    by_peer = torch.unflatten(x_BTH, 1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(by_peer, "sum", size, group))  # type: ignore[no-any-return]


_WAYS = {"same": _same, "sum": _sum, "joined": _joined, "summed part": _summed_part}
