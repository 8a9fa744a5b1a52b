"""Tensor parallelism: which matrices of a block are divided how (Shoeybi et al. 2019, arXiv
1909.08053), and where the architecture allows it the residual stream between them along the
sequence (Korthikanti et al. 2022, arXiv 2205.05198); of language models the vocabulary, too.

Parameters are DTensors, so that loading, saving and FSDP know of the whole; products are of local
tensors with collectives between them, because a DTensor's operations cost the host 0.1 ms or more.
Shapes: B rows, T tokens, H hidden."""

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
from rekindle.train import modules
from rekindle.train.mesh import Mesh
from rekindle.train.modules import Skip
from rekindle.train.weights import intervals

_ops = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Peers:
    """The tp ranks, and whether the residual stream between blocks is divided among them."""

    mesh: DeviceMesh
    group: str
    size: int
    sequence: bool

    def enter(self, stream: Tensor) -> Tensor:
        """The stream, [B, T, H], whole for every peer's columns; gradients come back as shares."""
        there, back = ("joined", "summed part") if self.sequence else ("same", "sum")
        return self._turned(stream, there, back)

    def leave(self, share: Tensor) -> Tensor:
        """Back to the stream: the sum over peers, whole, or divided to [B, T / size, H]."""
        there, back = ("summed part", "joined") if self.sequence else ("sum", "same")
        return self._turned(share, there, back)

    def _turned(self, x: Tensor, there: str, back: str) -> Tensor:
        return _Turn.apply(x, there, back, self.group, self.size)  # type: ignore[no-untyped-call,no-any-return]


class ColumnLinear(nn.Linear):
    """Has some of the outputs; takes a whole input, whose gradient is a share."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else _local(self.bias)
        return F.linear(input, _local(self.weight), bias)


class GatheredLinear(ColumnLinear):
    """The same, from whole to whole: peers put their outputs together."""

    peers: Peers

    def forward(self, input: Tensor) -> Tensor:
        mine = super().forward(self.peers.enter(input))
        low, high = intervals(self.weight)[0]
        return self.peers.leave(F.pad(mine, (low, len(self.weight) - high)))


class RowLinear(nn.Linear):
    """Has the weights of some of the inputs, takes those, and returns the stream."""

    peers: Peers

    def forward(self, input: Tensor) -> Tensor:
        out = self.peers.leave(F.linear(input, _local(self.weight)))
        if self.bias is None:
            return out
        # a peer that adds it to its own tokens only sees a share of the gradient
        return out + _local(self.bias, Partial() if self.peers.sequence else Replicate())


class RowEmbedding(nn.Embedding):
    """Has some rows of the table, looks those up, and returns the stream."""

    peers: Peers

    def forward(self, input: Tensor) -> Tensor:
        low, high = intervals(self.weight)[0]
        elsewhere = (input < low) | (input >= high)
        pad = self.padding_idx
        table = _local(self.weight)
        if low == high:  # more peers than rows: of an empty table nothing can be looked up
            return self.peers.leave(table.new_zeros((*input.shape, table.shape[1])) + table.sum())
        found = F.embedding(
            (input - low).masked_fill(elsewhere, 0),
            table,
            pad - low if pad is not None and low <= pad < high else None,
        )
        return self.peers.leave(found.masked_fill(elsewhere[..., None], 0))


def _local(parameter: Tensor, slope: Placement | None = None) -> Tensor:
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
    peers = Peers(mesh.over("tp"), str(group.group_name), mesh.layout.tp, sequence)
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
    known, sequence = _known(network), along_sequence(network, tokens)
    names = (*known.per_head, *(f"{column}.lora_A.default" for column in known.column))
    if sequence:  # what follows a row-divided matrix sees this rank's tokens only
        names += (*known.sequence, *(f"{row}.lora_B.default" for row in known.row))
    found = {f"{block}.{name}" for block, _ in modules.blocks(network) for name in names}
    if sequence:
        backbone = modules.backbone(network)
        body = next(name for name, module in network.named_modules() if module is backbone)
        found |= {f"{body}.{name}" for name in known.last}
    return frozenset(n for n, _ in network.named_parameters() if n.rpartition(".")[0] in found)


def _known(network: nn.Module) -> Modules:
    return modules.required(network, "tensor-parallel")


def _divide_layers(network: nn.Sequential, whole: nn.Module, peers: Peers) -> None:
    """A network of layers, such as the CNN: linear ones but the last are divided, and gathered."""
    layers = [name for name, layer in whole.named_modules() if isinstance(layer, nn.Linear)][:-1]
    if not layers:
        what = f"there is no matrix to divide in {modules.model_type(network)}"
        raise UnsupportedError(what, where="train.layout.tp", fix="use dp, or shard")
    for name in layers:
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Linear):  # not another stage's
            _become(GatheredLinear, layer, peers, Shard(0), Shard(0))


def _divide_block(block: nn.Module, known: Modules, peers: Peers) -> None:
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


def _divide_vocabulary(network: nn.Module, known: Modules, peers: Peers) -> None:
    """Token embedding, output layer and the way to it, as far as this stage has them."""
    body, model = modules.backbone(network), network
    table, head = getattr(body, known.table, None), model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(table, nn.Embedding):
        _become(RowEmbedding, table, peers, Shard(0))
    if isinstance(head, nn.Linear):
        _become(ColumnLinear, head, peers, Shard(0), Shard(0))
        if isinstance(table, nn.Embedding) and modules.tied(network):
            head.weight = table.weight
    norm = getattr(body, known.last[0], None)
    if peers.sequence and norm is not None and not isinstance(norm, Skip):
        norm.register_forward_hook(lambda module, args, stream: peers.enter(stream))


def _become(kind: type[nn.Module], module: nn.Module, peers: Peers, *placements: Placement) -> None:
    """Make `module` one of `kind`, with weight and bias divided."""
    module.__class__ = kind  # name, parameters and the hooks of others stay as they are
    module.peers = peers  # type: ignore[assignment]
    for name, placement in zip(("weight", "bias"), placements, strict=False):
        parameter = getattr(module, name)
        if parameter is not None:
            made = distribute_tensor(parameter, peers.mesh, [placement])
            module.register_parameter(name, nn.Parameter(made, parameter.requires_grad))


def _entering(peers: Peers, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if args:
        return (peers.enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": peers.enter(kwargs["hidden_states"])}


# Collectives that gradients pass through. A tensor is whole (each peer has all of it), a share (the
# peers' add up to it), or divided along its second dimension. Where a whole tensor feeds divided
# matrices, its gradient comes back as shares; each function turns one kind into another, and
# gradients back. `group` is a process group's name, because that is what a compiled graph can hold.


class _Turn(torch.autograd.Function):
    """One way of `_WAYS` forward, another one for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str, group: str, size: int) -> Tensor:
        ctx.back, ctx.group, ctx.size = back, group, size
        return _WAYS[there](x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _WAYS[ctx.back](grad, ctx.group, ctx.size), None, None, None, None


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
