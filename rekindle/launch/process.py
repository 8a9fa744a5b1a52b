"""Processes that end with their parent, folders that one process owns, signals that
arrive, what ranks on GPUs are started with, and how much memory of the host a process may
still take.

Memory follows the kernel's documents of cgroups, version 2 (memory.max, memory.current)
and version 1 (memory.limit_in_bytes, memory.usage_in_bytes), and proc(5). Pages of files
count as free: the kernel drops them when memory is needed. Standard library only."""

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
MARK = "REKINDLE_GANG"
_SWEEP_SECONDS = 5.0
_DRIVER_SECONDS = 30.0  # nvidia-smi loads the driver where nothing else uses it
# torch reads the first that is set; the last name is that of all accelerators
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies; exits at once if that is
    gone."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def dying_with_parent() -> Iterator[None]:
    """Die with the parent within the block, but not after it."""
    die_with_parent()
    try:
        yield
    finally:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def leave(code: int) -> NoReturn:
    """End at once: taking apart what was imported lasts half a second, and may wait for
    threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def name_process(name: str) -> None:
    """Set what `ps` and `top` show of this process (Linux): up to 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def has_gpu() -> bool:
    """Whether the driver of a GPU (NVIDIA, AMD) is loaded on this machine."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd"))


def gpus_have_bf16() -> bool:
    """Whether all GPUs here compute in bf16: NVIDIA's of compute capability 8 and above,
    as its driver says, so that this process does not start CUDA; all of AMD's that ROCm
    supports."""
    if shutil.which("nvidia-smi") is None:
        return Path("/dev/kfd").exists()
    capabilities = driver_says("compute_cap")
    for capability in capabilities:
        major = capability.partition(".")[0]
        if not major.isdecimal() or int(major) < 8:
            return False
    return bool(capabilities)


def driver_says(field: str) -> list[str]:
    """A field of each GPU here, as NVIDIA's driver has it; nothing without a driver or a
    device."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


def allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets segments grow, because steps of texts differ in length and
    would leave gaps that fit no later step; nothing where the user has set torch's
    allocator (its notes on CUDA memory)."""
    if any(name in environment for name in _ALLOCATOR):
        return {}
    return {_ALLOCATOR[-1]: "expandable_segments:True"}


def can_bind(nodes: Path = Path("/sys/devices/system/node")) -> bool:
    """Whether there are NUMA nodes, and numactl, for `torchrun --numa-binding` (2.10 and
    later)."""
    return len(list(nodes.glob("node[0-9]*"))) > 1 and shutil.which("numactl") is not None


def end_marked(mark: str, spared: Collection[int] = ()) -> None:
    """Kill every process with `REKINDLE_GANG=mark` in its environment, whatever its
    parent, until none is left (Linux only). One that the kernel cannot end is given up
    after 5 s."""
    deadline = time.monotonic() + _SWEEP_SECONDS
    entry = f"{MARK}={mark}".encode()
    while time.monotonic() < deadline:
        marked_pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            if pid in spared or pid == os.getpid():
                continue
            with contextlib.suppress(OSError):  # a zombie has no environment
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    marked_pids.append(pid)
        for pid in marked_pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not marked_pids:
            return
        time.sleep(0.02)  # and once more: one may have forked meanwhile


def moved(descriptor: int) -> int:
    """The same file under a number that no other process of ours is likely to use; the
    descriptor is closed."""
    lowest = 200
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit > 0:  # else there is none
        lowest = min(lowest, limit // 2)
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(descriptor)
    return copy


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie that its parent has not waited
    for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


@contextlib.contextmanager
def owned(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `folder` for this process alone, by a lock of the kernel's (flock); calls
    `on_wait` once if another process holds it, then waits. Made again where `rekindle gc`
    removes it meanwhile."""
    lock = folder / ".lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = lock.open("a")
        except FileNotFoundError:
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if is_at(lock, file.fileno()):
                yield
                return


def is_at(path: Path, handle: int) -> bool:
    """Whether the open file is still the one at `path`: another's lock keeps no process
    out."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


@contextlib.contextmanager
def on_signal(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` for SIGTERM and SIGINT instead of dying of them, until the block
    ends."""

    def handle(number: int, _: object) -> None:
        handler(number)

    handlers_before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        handlers_before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler_before in handlers_before.items():
            signal.signal(number, handler_before)


# of version 2, and of 1, whose counters without `total_` leave out what lies below
_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """The least that the machine and each of this process's cgroups have left."""
    free_bytes = []
    meminfo = (root / "proc/meminfo").read_text()
    available_kib = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if available_kib:
        free_bytes.append(int(available_kib[1]) * 1024)
    for top, own in _cgroups(root):
        for folder in (own, *own.parents):  # the limits of all of them count
            if not folder.is_relative_to(top):
                continue
            for limit_file, usage_file, prefix in _MEMORY_FILES:
                with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                    limit = int((folder / limit_file).read_text())
                    usage = int((folder / usage_file).read_text())
                    free_bytes.append(limit - usage + _page_cache_bytes(folder, prefix))
    return max(0, min(free_bytes, default=1 << 62))


def _page_cache_bytes(cgroup: Path, prefix: str) -> int:
    """The pages of files that count as used, and that the kernel drops when it needs
    them."""
    lines = (cgroup / "memory.stat").read_text().splitlines()
    counters = dict(line.split() for line in lines if line)
    inactive = int(counters.get(f"{prefix}inactive_file", 0))
    active = int(counters.get(f"{prefix}active_file", 0))
    return inactive + active


def memory_identity(root: Path = Path("/")) -> str:
    """The same text for processes that share memory: of one machine, in one container."""
    texts = []
    for path in ("proc/sys/kernel/random/boot_id", "proc/self/cgroup"):
        with contextlib.suppress(OSError):
            texts.append((root / path).read_text())
    with contextlib.suppress(OSError):  # in a namespace of its own each container is "/"
        texts.append(str((root / "proc/self/ns/cgroup").readlink()))
    return "".join(texts)


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory in this cgroup, or
    machine."""
    files = []
    with contextlib.suppress(OSError):
        for top, own in _cgroups(Path("/")):
            name = "memory.oom_control" if top.name == "memory" else "memory.events"
            files += [own / name, top / name]
    for path in (*files, Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            count = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if count:
                return int(count[1])
    return 0


def _cgroups(root: Path) -> Iterator[tuple[Path, Path]]:
    """The root of each hierarchy of cgroups, and the folder of this process's."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            yield top, top / path.lstrip("/")


def compute_threads() -> dict[str, str]:
    """The environment in which torch computes with no more threads than there are
    cores."""
    cores = float(len(os.sched_getaffinity(0)))
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota != "max":
            cores = min(cores, float(quota) / float(period))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, int(cores))))
    return {"OMP_NUM_THREADS": threads}
