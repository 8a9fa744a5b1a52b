"""Sizes that ranks do not divide: vocabularies, heads, feed-forward widths, documents. Whatever they are, the pieces of the loss
have the same number and size on all ranks, and loss and gradients are those of one process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.trainer_pt_utils import LabelSmoother

from rekindle.objectives import tokens as tensors
from rekindle.objectives.tokens import loss as tokens
from tests.support.train_step import LLAMA, Collectives, case

HERE, WORLD = Path(__file__).parent, 4
EXACT = 1e-9  # of fp64


class Ranks:
    """Real ranks on gloo, which answer one case after the other."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.txt"
        words = [sys.executable, str(HERE / "uneven_ranks.py"), str(folder), str(WORLD)]
        alone = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        environment = {**os.environ, **alone, "PYTHONPATH": str(HERE.parents[1])}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def error(self, **wanted: object) -> float:
        """The largest error of any rank in a case; fails where a rank does."""
        answer = ""
        if self.process.poll() is None:
            self.process.stdin.write(json.dumps(wanted) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"{wanted}: {self.log.read_text()[-3000:]}")
        return json.loads(answer)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.end()


MANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FEW = settings(MANY, max_examples=12)
SMOOTHING = st.sampled_from([0.0, 0.1, 0.9])
# from one row of the widest share at a time to all rows at once
BYTES = st.sampled_from([1, 64, 300, 1 << 12, 1 << 25])


@pytest.mark.slow
@MANY
@given(
    tp=st.integers(1, WORLD),
    vocabulary=st.integers(1, 70),
    targets=st.integers(0, 50),
    budget=BYTES,
    smoothing=SMOOTHING,
    seed=st.integers(0, 9),
)
@example(tp=2, vocabulary=41, targets=50, budget=300, smoothing=0.0, seed=0)
@example(tp=4, vocabulary=3, targets=9, budget=1, smoothing=0.1, seed=0)  # a rank without columns
@example(tp=4, vocabulary=5, targets=9, budget=64, smoothing=0.1, seed=0)  # 2, 2, 1 and 0 columns
def test_the_loss_and_its_gradients_do_not_depend_on_how_a_vocabulary_is_divided(
    ranks, tp, vocabulary, targets, budget, smoothing, seed
):
    about = {"tp": tp, "vocabulary": vocabulary, "targets": targets, "bytes": budget}
    assert ranks.error(what="loss", smoothing=smoothing, seed=seed, **about) <= EXACT


LAYOUTS = [
    {"tp": 4},
    {"tp": 2, "dp": 2},
    {"tp": 2, "shard": 2},
    {"tp": 2, "cp": 2},
    {"tp": 2, "pp": 2},
]


@pytest.mark.slow
@FEW
@given(
    layout=st.sampled_from(LAYOUTS),
    vocabulary=st.integers(2, 80),
    groups=st.integers(1, 2),
    each=st.integers(1, 2),
    width=st.integers(1, 5),
    ffn=st.integers(2, 50),  # FSDP takes no empty shares, which one column of two ranks would be
    longest=st.integers(4, 24),
    budget=BYTES,
    smoothing=SMOOTHING,
)
@example(
    layout={"tp": 4},
    vocabulary=3,
    groups=1,
    each=1,
    width=1,
    ffn=3,
    longest=4,
    budget=1,
    smoothing=0.1,
)
@example(
    layout={"tp": 2, "cp": 2},
    vocabulary=61,
    groups=1,
    each=2,
    width=3,
    ffn=47,
    longest=24,
    budget=300,
    smoothing=0.0,
)
def test_a_step_does_not_depend_on_sizes_that_ranks_do_not_divide(
    ranks, layout, vocabulary, groups, each, width, ffn, longest, budget, smoothing
):
    kv_heads = groups * layout["tp"]
    heads = kv_heads * each
    model = {
        **LLAMA,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * width,
        "hidden_size": 2 * width * heads,
        "intermediate_size": ffn,
    }
    wanted = {**case(model=model), "exact": True, "micro": 2 if "pp" in layout else 1}
    wanted |= {"degrees": layout, "vocabulary": vocabulary, "longest": longest}
    wanted |= {"smoothing": smoothing, "bytes": budget}
    assert ranks.error(what="step", **wanted) <= EXACT


@pytest.mark.parametrize("vocabulary", [2, 5, 61, 64])
def test_all_ranks_reduce_the_same_pieces(monkeypatch, vocabulary):
    """Each rank's collectives in the loss and in the scores, of a vocabulary that three divide unevenly."""
    monkeypatch.setitem(tensors.LOGITS_BYTES, "cpu", 256)
    seen = set()
    for rank in range(3):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (3,))
            head = distribute_tensor(
                torch.ones(vocabulary, 4), mesh, [Shard(0)], src_data_rank=None
            )
            states, labels = torch.ones(50, 4), torch.zeros(50, dtype=torch.int64)
            with Collectives() as collectives:
                tokens.linear_cross_entropy(
                    states, head, labels, torch.ones(()), mesh.get_group(), smoothing=0.1
                )
                tokens.judge_targets(states, head, labels, mesh.get_group())
            seen.add(tuple(collectives.found))
        finally:
            dist.destroy_process_group()
    (pieces,) = seen
    assert len(pieces) > 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_a_smoothed_loss_is_that_of_torch_and_of_transformers(monkeypatch, smoothing):
    monkeypatch.setitem(tensors.LOGITS_BYTES, "cpu", 1 << 10)
    torch.manual_seed(0)
    head = torch.randn(61, 8, dtype=torch.float64, requires_grad=True)
    states = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 61, (40,))
    loss, _ = tokens.linear_cross_entropy(
        states, head, labels, torch.tensor(1 / 40), smoothing=smoothing
    )
    found = torch.autograd.grad(loss, (states, head))
    logits = states @ head.T
    of_torch = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    expected = torch.autograd.grad(of_torch, (states, head), retain_graph=True)
    of_transformers = LabelSmoother(epsilon=smoothing)({"logits": logits}, labels)
    assert float(loss) == pytest.approx(float(of_torch), rel=1e-7)
    assert float(loss) == pytest.approx(float(of_transformers), rel=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_labels_are_smoothed_beside_a_teacher_and_not_in_what_the_teacher_says():
    torch.manual_seed(0)
    head = torch.randn(61, 8, dtype=torch.float64, requires_grad=True)
    states = torch.randn(40, 8, dtype=torch.float64)
    taught = torch.nn.Linear(8, 61, bias=False, dtype=torch.float64).requires_grad_(False)
    labels, one = torch.randint(0, 61, (40,)), torch.ones(())
    lesson = tokens.Lesson(taught, states, temperature=2.0, weight=0.25)
    loss, _ = tokens.linear_cross_entropy(states, head, labels, one, lesson=lesson, smoothing=0.1)
    logits = states @ head.T
    hard = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    soft = F.kl_div(
        F.log_softmax(logits / 2, -1),
        F.log_softmax(taught(states) / 2, -1),
        log_target=True,
        reduction="sum",
    )
    expected = 0.75 * hard + 0.25 * 4 * soft
    assert float(loss) == pytest.approx(float(expected), rel=1e-7)
    (found,), (wanted,) = (torch.autograd.grad(each, (head,)) for each in (loss, expected))
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-8)
