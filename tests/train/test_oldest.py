"""rekindle runs on every torch that pyproject.toml allows.

`make test` looks at the torch that it is tested with; `make test-oldest` runs this file, and the quick layouts, with the oldest one.
"""

import importlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from rekindle.errors import UnsupportedError
from rekindle.launch.fault import RehearsedFault
from rekindle.spec.layout import Layout
from rekindle.spec.model import LayoutSpec
from rekindle.train import compat
from rekindle.train.history import read_history
from tests.support.train_resume import DISTILBERT, GPT2, LM_STEPS, LM_TRAIN, Gang, written
from tests.train.oldest_torch import ROOT, Wheel, missing, sources

REQUIREMENTS = ROOT / "tests" / "requirements-oldest.txt"
OLDEST = re.search(r"^torch==(.*)$", REQUIREMENTS.read_text(), re.MULTILINE)[1]
TESTED = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
with_the_oldest = pytest.mark.skipif(
    not torch.__version__.startswith(OLDEST),
    reason=f"`make test-oldest` runs it, with torch {OLDEST}",
)


def test_the_versions_that_are_tested_are_the_ends_of_the_range_that_is_promised():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (torch_range,) = (r.specifier for r in map(Requirement, extras["train"]) if r.name == "torch")
    minor = [int(version.split(".")[1]) for version in (OLDEST, TESTED)]
    assert torch_range.contains(OLDEST)
    assert torch_range.contains(TESTED)
    assert torch_range.contains(f"2.{minor[1]}.9")
    assert not torch_range.contains(f"2.{minor[0] - 1}.9")
    assert not torch_range.contains(f"2.{minor[1] + 1}.0")


@pytest.mark.slow
def test_this_torch_has_every_name_and_keyword_that_rekindle_uses():
    folder = Path(torch.__file__).parents[1]
    assert missing(Wheel(folder), sources()) == []


def test_a_name_that_a_torch_lacks_is_found_wherever_it_is_used(tmp_path):
    """On a made-up torch of three files."""
    package = tmp_path / "torch"
    (package / "nn").mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import nn\nfrom .kernels import *\n")
    (package / "kernels.py").write_text(
        "def product(a, b, *, out=None): ...\nclass Mesh:\n    def flatten(self): ...\n    def __init__(self, sizes): ...\n"
    )
    (package / "nn" / "__init__.py").write_text("class Module: ...\n")
    user = tmp_path / "user.py"
    user.write_text(
        "import functools\nimport torch\nfrom torch import nn, absent\nfrom torch.nn import Module as M\n"
        "def later():\n    import torch.gone\n    torch.product(1, 2, out=3)\n    torch.product(1, 2, out_dtype=4)\n"
        "functools.partial(torch.product, fast=True)\nnn.Linear\nM\ntorch.Mesh.flatten\ntorch.Mesh.unflatten\n"
        "torch.Mesh(sizes=1)\ntorch.Mesh(names=1)\nreplaced(torch.Mesh, 'folded', None)\n"
    )
    found = [line.removeprefix(f"{user}:") for line in missing(Wheel(tmp_path), [user])]
    assert found == [
        "3 torch.absent",
        "6 torch.gone",
        "8 torch.product(out_dtype=)",
        "9 torch.product(fast=)",
        "10 torch.nn.Linear",
        "13 torch.Mesh.unflatten",
        "15 torch.Mesh(names=)",
        "16 torch.Mesh.folded",
    ]


def by_document(query_THD, key_TGD, value_TGD, bounds, causal, scale, left=-1):
    """What varlen_attn computes, one document after the other."""
    outs = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query_THD, key_TGD, value_TGD))
        assert k.shape[1] in (q.shape[1], 2)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        places = torch.arange(end - start)
        ahead = places[None] - places[:, None]
        mask = (ahead <= 0) if causal else torch.ones_like(ahead, dtype=torch.bool)
        mask &= (ahead >= -left) if left >= 0 else True
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def of_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return by_document(q, k, v, cu_seq_q, is_causal, None)


def of_2_11(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return by_document(q, k, v, cu_seq_q, window_size[1] == 0, scale, window_size[0])


@pytest.mark.parametrize("kernel", [of_2_10, of_2_11])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_varlen_attention_of_an_older_torch_takes_todays_keywords(kernel, causal, scale, key_heads):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(11, heads, 8, generator=draw, dtype=torch.float64)
        for heads in (4, key_heads, key_heads)
    )
    bounds = torch.tensor([0, 4, 11])
    out = compat.with_todays_keywords(kernel)(
        q,
        k,
        v,
        bounds,
        bounds,
        7,
        7,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=key_heads != 4,
    )
    torch.testing.assert_close(out, by_document(q, k, v, bounds, causal, scale))


def test_a_sliding_window_is_refused_by_a_torch_that_has_none():
    q = torch.randn(4, 2, 8)
    bounds = torch.tensor([0, 4])
    with pytest.raises(UnsupportedError, match="has no sliding window") as refused:
        compat.with_todays_keywords(of_2_10)(q, q, q, bounds, bounds, 4, 4, window_size=(2, 0))
    assert refused.value.problems[0].fix == "use torch 2.11 or later"
    out = compat.with_todays_keywords(of_2_11)(q, q, q, bounds, bounds, 4, 4, window_size=(2, 0))
    torch.testing.assert_close(out, by_document(q, q, q, bounds, True, None, 2))


@with_the_oldest
def test_every_module_of_the_data_plane_imports():
    folders = [ROOT / "rekindle" / name for name in ("train", "tasks", "evaluate", "launch")]
    names = [
        ".".join(f.relative_to(ROOT).with_suffix("").parts) for d in folders for f in d.glob("*.py")
    ]
    for name in names:
        importlib.import_module(name.removesuffix(".__init__"))


SMOKES = {
    "texts with a class, two replicas": ("text_classification", DISTILBERT, "auto"),
    "documents, two shards": ("causal_lm", GPT2, LayoutSpec(shard=2)),
}


@with_the_oldest
@pytest.mark.parametrize("name", SMOKES)
def test_two_ranks_train_save_lose_a_rank_and_resume(name, tmp_path):
    task, model, layout = SMOKES[name]
    train = LM_TRAIN.model_copy(update={"layout": layout})
    gang = Gang(tmp_path, written(tmp_path, task, model), 2, train, task, model)
    gang.environment = RehearsedFault("kill", 15, str(tmp_path)).environment()
    gang.start().finish()
    assert "restarting all ranks (1 of 3)" in gang.said
    assert re.search(
        rf"resumed from the checkpoint of step (6|12) of {LM_STEPS} on 2 ranks", gang.said
    )
    losses = [row.loss for row in read_history(gang.folder / "training-1" / "history.jsonl")]
    assert len(losses) == LM_STEPS
    third = LM_STEPS // 3  # three classes drawn at random are not learnt in so few steps
    assert np.mean(losses[-third:]) < 1.02 * np.mean(losses[:third])
    assert (gang.folder / "model-1" / "model.safetensors").exists()


@with_the_oldest
def test_a_schedule_that_this_torch_cannot_run_is_refused_by_name():
    compat.check_schedule(Layout(pp=2, schedule="interleaved"))
    with pytest.raises(
        UnsupportedError, match=r"zero_bubble needs torch 2\.13, this is torch 2\.10"
    ) as refused:
        compat.check_schedule(Layout(pp=2, schedule="zero_bubble"))
    assert refused.value.problems[0].where == "train.layout.schedule"
