"""Private names of other packages that rekindle stands on: each is in this table, exists in the versions that are tested, and its
package has an upper bound, so that a release that drops one is met here and not by a user."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
STANDARD = {
    "_exit",
    "_make",
    "_replace",
    "_run_exitfuncs",
    "_shutdown",  # of Python: documented, or as old as it
    "_strip_protocol",  # fsspec documents it for those who write filesystems
}


@dataclasses.dataclass(frozen=True)
class Borrowed:
    """`where` has the name: a module, a class in it, or a class whose instances set it themselves."""

    package: str
    where: str
    breaks: str


BORROWED = {
    "TorchDispatchMode": Borrowed(
        "torch", "torch.utils._python_dispatch", "weights filled by name"
    ),
    "_from_config": Borrowed(
        "transformers",
        "transformers.modeling_utils:PreTrainedModel",
        "the architecture that a checkpoint says it is",
    ),
    "_keys_to_ignore_on_load_missing": Borrowed(
        "transformers", "transformers.modeling_utils:PreTrainedModel", "weights that are computed"
    ),
    "_keys_to_ignore_on_load_unexpected": Borrowed(
        "transformers", "transformers.modeling_utils:PreTrainedModel", "weights that are computed"
    ),
    "_split_inputs": Borrowed(
        "torch", "torch.distributed.pipelining.schedules:_PipelineSchedule", "pipelines"
    ),
    "_functional_collectives": Borrowed(
        "torch", "torch.distributed", "collectives while compiling and tracing"
    ),
    "_StorageInfo": Borrowed(
        "torch", "torch.distributed.checkpoint.filesystem", "checkpoints read without unpickling"
    ),
    "_ReaderView": Borrowed(
        "torch", "torch.distributed.checkpoint.utils", "checkpoints read without a copy"
    ),
    "_MEM_FORMAT_ENCODING": Borrowed(
        "torch", "torch.distributed.checkpoint.metadata", "checkpoints read without unpickling"
    ),
    "_StridedShard": Borrowed(
        "torch",
        "torch.distributed.tensor.placement_types",
        "weights divided by shard and tp together",
    ),
    "_flatten": Borrowed(
        "torch", "torch.distributed.device_mesh:DeviceMesh", "meshes of shard and cp together"
    ),
    "_lazy_init": Borrowed(
        "torch",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        "FSDP settled before the first step",
    ),
    "_local_tensor": Borrowed(
        "torch", "torch.distributed.tensor:DTensor", "shards read without a copy"
    ),
    "_parameters": Borrowed("torch", "torch.nn:Module", "weights replaced in place"),
    "_buffers": Borrowed("torch", "torch.nn:Module", "weights replaced in place"),
    "_is_view": Borrowed("torch", "torch:Tensor", "what a pipeline's stage sends"),
    "_foreach_norm": Borrowed("torch", "torch", "the norm of gradients"),
    "_dynamo": Borrowed("torch", "torch", "compilation"),
    "_set_deterministic_fill_uninitialized_memory": Borrowed(
        "torch", "torch._C", "train.deterministic"
    ),
    "_C": Borrowed("torch", "torch", "train.deterministic"),
    "_c10d_functional": Borrowed("torch", "torch.ops", "collectives while compiling and tracing"),
    "_cdata": Borrowed("torch", "torch:UntypedStorage", "which tensors share memory"),
    "_schema": Borrowed("torch", "torch._ops:OpOverload", "weights filled by name"),
    "_unpickler": Borrowed(
        "torch", "torch.distributed.distributed_c10d", "nothing that a peer sends is unpickled"
    ),
    "_popen": Borrowed(
        "torch",
        "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler",
        "ranks are forked, not started",
    ),
    "_attn_implementation": Borrowed(
        "transformers", "transformers:PretrainedConfig", "attention of our own"
    ),
    "get_datastore_info": Borrowed(
        "azure-ai-ml", "azure.ai.ml._artifacts._artifact_utilities", "files of a run on Azure ML"
    ),
    "get_job_output_uris_from_dataplane": Borrowed(
        "azure-ai-ml", "azure.ai.ml.operations._job_ops_helper", "outputs of a run on Azure ML"
    ),
    "_runs_operations": Borrowed(
        "azure-ai-ml", "azure.ai.ml.operations:JobOperations", "logs of a run on Azure ML"
    ),
    "_dataset_dataplane_operations": Borrowed(
        "azure-ai-ml", "azure.ai.ml.operations:JobOperations", "outputs of a run on Azure ML"
    ),
    "_model_dataplane_operations": Borrowed(
        "azure-ai-ml", "azure.ai.ml.operations:JobOperations", "outputs of a run on Azure ML"
    ),
    "_is_enabled": Borrowed(
        "azure-ai-ml", "azure.ai.ml.entities:Schedule", "schedules on Azure ML"
    ),
    "_run_api": Borrowed("kfp", "kfp:Client", "runs on Kubeflow"),
    "_recurring_run_api": Borrowed("kfp", "kfp:Client", "schedules on Kubeflow"),
    "_get_fp32_opt_state_partition": Borrowed(
        "deepspeed",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "saves of ZeRO-3",
    ),
    "_get_param_partition_rank": Borrowed(
        "deepspeed",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "saves of ZeRO-3",
    ),
    "_reassign_or_swap_out_partitioned_parameters": Borrowed(
        "deepspeed",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "a resumed ZeRO-3",
    ),
    "_lazy_init_hp_params_optimizer_state": Borrowed(
        "deepspeed",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "saves of ZeRO-1 and 2",
    ),
    "_hp_mapping": Borrowed(
        "deepspeed", "deepspeed.utils.mixed_precision_linkage", "saves of ZeRO-1 and 2"
    ),
}


@functools.cache
def trees() -> list[ast.Module]:
    files = (ROOT / "rekindle").rglob("*.py")
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own() -> set[str]:
    """Private names that rekindle binds itself."""
    found = set[str]()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    found.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    found.add(node.id)
                case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                    found.add(node.attr)
                case ast.ImportFrom(module=str(module)) if module.startswith("rekindle"):
                    found |= {alias.name for alias in node.names}
    return {name for name in found if is_private(name)}


def used() -> set[str]:
    """Private names of others, and public ones of their private modules."""
    found, ours = set[str](), own()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module)) if not module.startswith("rekindle"):
                    inside = any(map(is_private, module.split(".")))
                    found |= {a.name for a in node.names if inside or is_private(a.name)}
                case ast.Import():
                    found |= {p for a in node.names for p in a.name.split(".") if is_private(p)}
                case ast.Attribute() if is_private(node.attr) and node.attr not in ours:
                    found.add(node.attr)
    return found - STANDARD


# rekindle binds these itself, too, or names them in a string
ALSO = {"_buffers", "_popen"}


def test_every_private_name_of_another_package_is_in_the_table() -> None:
    found = used()
    assert found - set(BORROWED) == set()
    assert set(BORROWED) - found - ALSO == set(), "the table has more than is used"


def owner(where: str) -> Any:
    module, _, name = where.partition(":")
    if module == "torch.ops":
        import torch

        return torch.ops
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.slow
@pytest.mark.parametrize("name", BORROWED)
def test_the_name_is_there(name: str) -> None:
    borrowed = BORROWED[name]
    found = owner(borrowed.where)
    if hasattr(found, name):
        return
    lines = inspect.getsource(found)  # set on an instance
    what = f"{borrowed.package} has no {name} in {borrowed.where}: {borrowed.breaks} would break"
    assert re.search(rf"\b(self|p|param|lp_param)\.{name}\b", lines), what


def test_packages_with_borrowed_names_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    for package in {borrowed.package for borrowed in BORROWED.values()}:
        wanted = [r for words in lists for r in map(Requirement, words) if r.name == package]
        assert wanted, package
        for requirement in wanted:
            assert any(s.operator == "<" for s in requirement.specifier), str(requirement)
