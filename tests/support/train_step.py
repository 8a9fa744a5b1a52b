"""What tests share with train/test_step.py."""

import contextlib
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

UNSAVED = types.SimpleNamespace(pending=None, written=lambda: True, settle=lambda save: None)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}


# what returns a value to Python, or tensors whose size depends on one
BERT = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 24,
    "max_position_embeddings": 32,
}
READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "allclose",
    "argwhere",
    "__contains__",
}


def case(task="causal_lm", model=LLAMA, axes=(), **cell):
    cell = {
        "axes": axes,
        "schedule": "",
        "checkpointing": "none",
        "compile": False,
        "precision": "fp32",
        "lora": False,
        **cell,
    }
    return {
        "task": task,
        "model": model,
        "cell": cell,
        "exact": False,
        "packing": task == "causal_lm",
        "micro": 2,
    }


@contextlib.contextmanager
def ranks(world):
    """The first of so many ranks; the others do not exist, and what they would send stays as it was."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Reads(TorchFunctionMode):
    """Where Python asked for the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        by_mask = name == "__getitem__" and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in READS or by_mask:
            frame = sys._getframe(1)
            self.found.append(
                f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
            )
        return function(*args, **(kwargs or {}))


class Collectives(TorchDispatchMode):
    """Types and sizes of what was added up between ranks."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allreduce" in str(function) or "all_reduce" in str(function):
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.found += [(t.dtype, t.numel()) for t in tensors]
        return function(*args, **(kwargs or {}))
