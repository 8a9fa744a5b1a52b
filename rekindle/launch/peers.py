"""What ranks send each other as Python objects, without running what it may contain.

gloo's and NCCL's connections are not authenticated, and torch unpickles what arrives over them for
`all_gather_object` and its kin: ours, those with which DCP plans a checkpoint, those with which
stages of a pipeline tell shapes. Authority: torch.distributed.distributed_c10d (2.10 to 2.13)."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import sys
from typing import Any

_THEIRS = (
    "torch.distributed.checkpoint.", "torch.distributed.pipelining.", "rekindle.train.",
    "rekindle.errors",
)  # fmt: skip
_ALSO = {
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"), ("collections", "OrderedDict"),
    ("traceback", "StackSummary"), ("traceback", "FrameSummary"),
}  # fmt: skip


class PlainUnpickler(pickle.Unpickler):
    """Makes values: exceptions, and dataclasses and enums of those who have ranks talk. Of what
    else is named it neither imports nor calls anything."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        if (module, name) in _ALSO or type(found).__name__ == "dtype" or _is_plain(module, found):
            return found
        if (module, name) == ("builtins", "getattr"):  # members of enums, before Python 3.11.4
            return _member
        raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which none of this job does")


def _is_plain(module: str, found: Any) -> bool:
    if not isinstance(found, type):
        return False
    values = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
    return issubclass(found, BaseException) or (values and module.startswith(_THEIRS))


def _member(kind: Any, name: str) -> enum.Enum:
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"a rank sent {name!r} of {kind!r}")


def guard() -> None:
    """Have torch read objects of other ranks so, in this process."""
    from torch.distributed import distributed_c10d

    assert hasattr(distributed_c10d, "_unpickler"), "this torch reads objects in another way"
    distributed_c10d._unpickler = PlainUnpickler
