"""What differs between the versions of torch that the engine runs on: 2.10 to 2.13.

2.10 is the torch of NGC 25.12, the base of containers/train; 2.13 is what everything is
tested with. Each name here says what changed and when. `make test-oldest` trains with the
oldest version, and tests/train/oldest_torch.py checks every other name that rekindle
imports from torch.

A range, because pyproject.toml once allowed a torch that lacks names which the engine
imports, and no documented NGC base has 2.13. An upper bound, because
tests/plan/traced/fakes.py replaces private parts of torch. Tests run on both ends and on
no version between: that costs two minutes of CI. Zero-bubble schedules and traces of
pipelines need 2.13. To change the range, change the bounds in pyproject.toml,
containers/requirements.txt and tests/requirements-oldest.txt with it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch.distributed import _functional_collectives

from rekindle.errors import UnsupportedError
from rekindle.spec.layout import Layout

# torch 2.13 renamed all_gather_tensor_autograd, and warns where the old name is called
all_gather_single_autograd: Callable[..., torch.Tensor] = (
    getattr(_functional_collectives, "all_gather_single_autograd", None)
    or _functional_collectives.all_gather_tensor_autograd
)

# windows of `varlen_attn`: how many tokens before and after it a token sees; -1 is all
EVERYTHING = (-1, -1)
NOT_LATER = (-1, 0)


def with_todays_keywords(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A varlen_attn of any version as one that takes `scale`, `window_size` and
    `enable_gqa`. 2.10 takes `is_causal` and no sliding window (UnsupportedError), 2.11 no
    `enable_gqa`."""
    parameters = inspect.signature(kernel).parameters
    if {"scale", "window_size", "enable_gqa"} <= parameters.keys():
        return kernel

    def attend(
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        *places: object,
        scale: float | None = None,
        window_size: tuple[int, int] = EVERYTHING,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {}
        if "scale" in parameters:
            options["scale"] = scale
        elif scale is not None:
            query_THD = query_THD * (scale * query_THD.shape[-1] ** 0.5)
        if "window_size" in parameters:
            options["window_size"] = window_size
        elif window_size in (EVERYTHING, NOT_LATER):
            options["is_causal"] = window_size == NOT_LATER
        else:
            message = f"varlen attention of torch {torch.__version__} has no sliding window"
            raise UnsupportedError(message, where="model.source", fix="use torch 2.11 or later")
        return kernel(query_THD, key_TGD, value_TGD, *places, **options)  # type: ignore[no-any-return]

    return attend


_kernels: list[Callable[..., torch.Tensor]] = []


def varlen_attn(*arguments: object, **keywords: object) -> torch.Tensor:
    """torch's varlen_attn with the keywords of 2.13, on every version."""
    if not _kernels:
        from torch.nn.attention.varlen import varlen_attn as kernel  # more than a second

        _kernels.append(with_todays_keywords(kernel))
    return _kernels[0](*arguments, **keywords)


def check_schedule(layout: Layout) -> None:
    """Raises UnsupportedError for zero bubble on torch 2.10 and 2.11, which cannot run it."""
    where = "train.layout.schedule"
    # NGC's builds are pre-releases of their version: 2.10.0a0+b4e4ee8.nv25.12
    is_older = Version(torch.__version__).release[:2] < (2, 13)
    if layout.pp > 1 and layout.schedule == "zero_bubble" and is_older:
        message = f"{where}: zero_bubble needs torch 2.13, this is torch {torch.__version__}"
        fix = "use 1f1b or interleaved, or an image with a newer torch"
        raise UnsupportedError(message, where=where, fix=fix)
