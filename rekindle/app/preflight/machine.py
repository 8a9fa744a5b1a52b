"""Checks of this machine: what a local run needs of it, and what a config names on it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rekindle.app.preflight.check import Need, PreflightCheck
from rekindle.app.preflight.files import missing_file, missing_source
from rekindle.engines import engine_of
from rekindle.errors import Problem, RekindleError, RequestError
from rekindle.launch.process import has_gpu
from rekindle.plan.request import known_shape
from rekindle.platforms.docker import find
from rekindle.spec.layout import resolve
from rekindle.spec.layout_support import KIND_OF, cell_of, refusal, require
from rekindle.spec.model import Spec

# package -> extra of rekindle that installs it
NEEDED = {"pyarrow": "data", "numpy": "data", "torch": "train", "mlflow": "registry"}
REGISTRY_SCHEMES = (
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "databricks",
)
_MPIRUN_SECONDS = 20
_INSTALL_OPEN_MPI = "install Open MPI (apt-get install openmpi-bin), or use torchrun"


class PackagesCheck(PreflightCheck):
    """Packages that the shipped pipeline needs; a user's may need others."""

    name = "packages"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        if spec.pipeline is not None:
            return
        missing = [name for name in NEEDED if not is_installed(name)]
        if missing:
            extras = ",".join(sorted({NEEDED[name] for name in missing}))
            yield Problem(
                f"a local run needs {', '.join(missing)}",
                fix=f"pip install 'rekindle[{extras}]', or [local] for all",
            )


class FilesCheck(PreflightCheck):
    """Local files and folders that the config names and that are not there."""

    name = "files"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        if spec.data is not None:
            for part in spec.data.parts:
                yield from missing_source(part.source)
        if spec.pipeline is not None:
            path, colon, _ = spec.pipeline.partition(".py:")
            yield from missing_file(path + colon.removesuffix(":"), "pipeline")
        if spec.train.entrypoint:
            script = shlex.split(spec.train.entrypoint)[0]
            if script != "-m":  # what follows is a module, which the step imports
                yield from missing_file(script, "train.entrypoint")
        sources = {
            "source": spec.model.source,
            "tokenizer": spec.model.tokenizer,
            "init_from": spec.model.init_from,
        }
        if spec.model.teacher is not None:
            sources["teacher.source"] = spec.model.teacher.source
        for field, source in sources.items():
            # other names are the hub's, or URIs
            if isinstance(source, str) and source.startswith("/") and not Path(source).exists():
                yield Problem(
                    f"folder not found: {source}",
                    f"model.{field}",
                    "check the path; a hub name has no leading slash",
                )


class LayoutCheck(PreflightCheck):
    """What the ranks on this machine would refuse once the data is ready: a layout that
    does not divide them or the model, a combination that no test has trained."""

    name = "layout"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        kind = KIND_OF.get(spec.task)
        train = spec.train
        if kind is None or train.entrypoint:
            return
        try:
            layout = resolve(train, spec.platforms.local.ranks, known_shape(spec))
            precisions = [train.precision]
            if train.precision == "auto":  # which the ranks decide
                precisions = ["bf16", "fp32"] if has_gpu() else ["fp32"]
            cells = []
            for precision in precisions:
                in_precision = train.model_copy(update={"precision": precision})
                cells.append(cell_of(kind, layout, in_precision, spec.model.lora is not None))
            # the ranks may still choose a precision that trains
            if all(refusal(cell, train.untested) for cell in cells):
                require(cells[0], train.untested)
        except RekindleError as error:
            yield from error.problems


class EngineCheck(PreflightCheck):
    """What another engine, launcher, precision or base needs and is not installed."""

    name = "engine"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        train = spec.train
        lora = spec.model.lora
        if lora is not None and lora.base == "4bit" and not is_installed("bitsandbytes"):
            yield Problem(
                "a base in 4 bits needs the package bitsandbytes",
                "model.lora.base",
                "pip install 'rekindle[qlora]'",
            )
        if train.launcher == "mpirun":
            mpirun = shutil.which("mpirun")
            if mpirun is None:
                yield Problem("there is no mpirun", "train.launcher", _INSTALL_OPEN_MPI)
            elif not _is_open_mpi(mpirun):
                yield Problem(f"{mpirun} is not Open MPI's", "train.launcher", _INSTALL_OPEN_MPI)
        if train.precision == "fp8" and not is_installed("torchao"):
            yield Problem(
                "fp8 needs the package torchao",
                "train.precision",
                "pip install 'rekindle[fp8]'",
            )
        engine = engine_of(train.engine)
        if engine is None:
            return
        if not is_installed(engine.package):
            yield Problem(
                f"the engine {train.engine} needs the package {engine.package}",
                "train.engine",
                f"pip install 'rekindle[{train.engine}]'",
            )
        for program in engine.programs(train):
            if shutil.which(program) is None:
                yield Problem(
                    f"the engine {train.engine} needs {program} for these settings",
                    "train.engine_config",
                    f"install {program}, or remove offload",
                )


class SecretsCheck(PreflightCheck):
    """Secrets of local steps that no environment variable holds."""

    name = "secrets"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        for name, reference in spec.platforms.local.secrets.items():
            variable = reference.removeprefix("env:")
            if variable not in os.environ:
                yield Problem(
                    f"the environment variable {variable} is not set",
                    f"platforms.local.secrets.{name}",
                    f"export {variable}=...",
                )


class DockerCheck(PreflightCheck):
    """Steps that run in containers where no docker answers."""

    name = "docker"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        if spec.platforms.local.containers == "always":
            try:
                find(os.environ)
            except RequestError as error:
                yield from error.problems


class RegistryCheck(PreflightCheck):
    """A tracking URI that MLflow refuses."""

    name = "registry"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        uri = spec.registration.tracking_uri
        scheme = uri.partition("://")[0].partition("+")[0]
        if uri and ("://" not in uri or scheme not in REGISTRY_SCHEMES):
            yield Problem(
                f"{uri!r} is not a tracking URI that MLflow 3 takes",
                "register.tracking_uri",
                "https://..., postgresql://..., sqlite:///file.db, or empty for the embedded one",
            )


class HomeCheck(PreflightCheck):
    """A home that cannot be made, or not be written to."""

    name = "home"
    need = Need.MACHINE

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        paths = (home.absolute(), *home.absolute().parents)
        existing = next((path for path in paths if path.exists()), Path("/"))
        dangling_links = [path for path in paths if path.is_symlink() and not path.exists()]
        if dangling_links:
            yield Problem(
                f"the link {dangling_links[0]} leads nowhere", "--home", "name another folder"
            )
        elif not existing.is_dir():
            yield Problem(f"{existing} is a file, not a folder", "--home", "name another folder")
        elif not _is_writable(existing):
            yield Problem(
                f"the folder {existing} is not writable",
                "--home",
                "correct its permissions, or name another --home",
            )


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def _is_open_mpi(mpirun: str) -> bool:
    """Whether this mpirun is Open MPI's: MPICH and others take other options."""
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=_MPIRUN_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return "Open MPI" in answer.stdout


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, as far as can be told without writing."""
    # the mount, too: root passes every check of modes
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.access(folder, os.W_OK | os.X_OK) and not is_read_only
