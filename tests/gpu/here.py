"""The machine that checks run on: its device, how much memory that has, and what a check may conclude there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

GIB = 2**30
ROOT = Path(__file__).parents[2]
PACKAGES = ("transformers", "triton", "peft", "accelerate")

PASS, FAIL, FIGURE, CPU_ONLY = "pass", "**fail**", "figure", "not judged on a CPU"


class TooSmall(Exception):
    """The device has less memory than a case needs; its text says how much."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what was looked at, what came out, and whether that is right."""

    seen: str
    figure: str
    result: str


@dataclasses.dataclass(frozen=True)
class Here:
    """Where checks run. `tiny` shrinks all models, so that every line runs on a CPU in seconds."""

    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, device: str, tiny: bool) -> Here:
        return cls(torch.device(device, 0) if device == "cuda" else torch.device(device), tiny)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def judged(self, seen: str, figure: str, right: bool) -> Row:
        """A row with a verdict that holds on any device."""
        return Row(seen, figure, PASS if right else FAIL)

    def on_gpu(self, seen: str, figure: str, right: bool) -> Row:
        """A row with a verdict that a CPU cannot give."""
        return self.judged(seen, figure, right) if self.cuda else Row(seen, figure, CPU_ONLY)

    def figure(self, seen: str, figure: str) -> Row:
        """A row that nothing is concluded from."""
        return Row(seen, figure, FIGURE)

    def skipped(self, seen: str, reason: str) -> Row:
        return Row(seen, "", f"skipped: {reason}")

    def room_for(self, bytes_needed: float) -> None:
        """Raises TooSmall where the device has less than this free."""
        if not self.cuda:
            return
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        if free < bytes_needed:
            raise TooSmall(
                f"needs {bytes_needed / GIB:.1f} GiB, {free / GIB:.1f} of {total / GIB:.1f} are free"
            )

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def held(self) -> int:
        """Bytes of tensors on the device now; 0 on a CPU."""
        return int(torch.cuda.memory_allocated(self.device)) if self.cuda else 0

    def peak(self) -> int:
        """The most bytes of tensors since `reset_peak`; 0 on a CPU."""
        return int(torch.cuda.max_memory_allocated(self.device)) if self.cuda else 0


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB / 10 else f"{count / 2**20:.2f} MiB"


@contextlib.contextmanager
def alone(here: Here) -> Iterator[None]:
    """A process group of this process only, with the backends of a training."""
    with tempfile.TemporaryDirectory() as folder:
        if here.cuda:
            torch.cuda.set_device(here.device)
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if here.cuda else "gloo",
            init_method=f"file://{folder}/meet",
            rank=0,
            world_size=1,
            device_id=here.device if here.cuda else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def facts(here: Here) -> dict[str, str]:
    """What the table's header says of the machine."""
    found = {"device": platform.processor() or platform.machine(), "driver": "none", "memory": ""}
    if here.cuda:
        properties = torch.cuda.get_device_properties(here.device)
        found = {
            "device": f"{properties.name}, compute capability {properties.major}.{properties.minor}",
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "memory": f"{properties.total_memory / GIB:.1f} GiB",
        }
    found |= {"torch": torch.__version__, "CUDA": torch.version.cuda or "not built in"}
    found |= {name: _version(name) for name in PACKAGES}
    changed = _said("git", "status", "--porcelain", "--untracked-files=no")
    commit = _said("git", "rev-parse", "--short=12", "HEAD")
    found["commit"] = commit + (" with changes" if changed not in ("", "unknown") else "")
    return found | {"python": platform.python_version()}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().partition("\n")[0] if not done.returncode else "unknown"
