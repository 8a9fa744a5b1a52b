"""The code of the GPU's checks, run on a CPU with tiny models, so that a slip in one does not cost a session on a GPU.

What only a GPU can show has the result `not judged on a CPU` here; arithmetic, saving, resuming and counting are judged. All quick
checks share one process, which can import nothing that a training does not need."""

import subprocess
import sys

import pytest
import torch

from rekindle.spec.layout import Layout
from rekindle.spec.layout_support import cell_of, require
from rekindle.spec.model import TrainSpec
from tests.gpu import kernels, runner, start, table
from tests.gpu.here import CPU_ONLY, FAIL, FIGURE, PASS, ROOT, Here, Row, TooSmall
from tests.gpu.table import Result

TINY = Here.of("cpu", True)
SLOW = ("start", "resume", "compile", "memory", "speed", "deepspeed", "optimizer")
QUICK = tuple(name for name in runner.CHECKS if name not in SLOW)
# checks that a CPU judges in full or in part
JUDGED = (
    "start",
    "optimizer",
    "losses",
    "resume",
    "saving",
    "fp16",
    "compile",
    "memory",
    "waiting",
    "loss",
    "context",
    "deepspeed",
)

here_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: its checks run for real"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return start.without_unneeded(tmp_path_factory.mktemp("blocked"))


def rows_of(names, environment):
    done = subprocess.run(
        runner.command_of(names, TINY),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return runner.rows_in(done.stdout), done.stderr


@pytest.fixture(scope="module")
def quick(environment):
    return rows_of(QUICK, environment)


def check(name, rows, said):
    assert rows, said[-3000:]
    assert not [row for row in rows if row.result == FAIL], f"{rows}\n{said[-3000:]}"
    assert {row.result for row in rows} <= {PASS, FIGURE, CPU_ONLY}
    if name in JUDGED:
        assert PASS in {row.result for row in rows}


@here_only
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", QUICK)
def test_the_code_of_a_quick_check_runs_on_a_cpu_and_finds_no_fault(name, quick):
    rows, said = quick
    check(name, rows.get(name), said)


@here_only
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW)
def test_the_code_of_a_slow_check_runs_on_a_cpu_and_finds_no_fault(name, environment):
    rows, said = rows_of([name], environment)
    check(name, rows.get(name), said)


@pytest.mark.slow
def test_what_the_checks_and_the_bench_import_is_there_on_a_machine_that_only_trains(environment):
    script = (
        "import sys; sys.path[:0] = ['tests/bench']\n"
        "import bench_gpu, by_hand, peers\n"
        "import rekindle.train.worker, tests.train.test_resume, tests.gpu.test_gpu\n"
        "from tests.gpu import runner\n"
        "for one in runner.CHECKS.values(): __import__('tests.gpu.' + one.place.partition(':')[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    blocked = subprocess.run(
        [sys.executable, "-c", "import kfp"], capture_output=True, text=True, env=environment
    )
    assert "No module named 'kfp'" in blocked.stderr


def test_all_checks_take_at_most_half_an_hour_together():
    assert sum(one.seconds for one in runner.CHECKS.values()) <= 30 * 60


def test_the_bench_counts_every_matrix_of_gpt_2(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import bench_gpu

    shape = bench_gpu.shrunk(bench_gpu.SHAPES[0])
    wide, layers, words = (shape.model[name] for name in ("n_embd", "n_layer", "vocab_size"))
    matrices = layers * 12 * wide**2 + words * wide
    assert bench_gpu._cost(bench_gpu._prepared(shape, tmp_path), shape) > 6 * matrices


def test_what_the_bench_asks_of_the_engine_is_not_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import bench_gpu

    for shape in bench_gpu.SHAPES:
        train = TrainSpec.model_validate(
            {
                "precision": "bf16",
                "weights": shape.weights,
                "compile": True,
                "activation_checkpointing": shape.recompute,
                "global_batch_size": shape.batch,
                "micro_batch_size": shape.micro,
            }
        )
        layout = Layout(shard=shape.ranks, micro_batch_size=shape.micro)
        require(cell_of("tokens", layout, train, shape.lora))


# Rows and tables


def boom(here):
    yield here.judged("before", "1", True)
    raise ValueError("broken | here\nand more")


def small(here):
    raise TooSmall("needs 99.0 GiB")
    yield


@pytest.mark.parametrize(
    ("made", "expected"),
    [(boom, [("before", PASS), ("raised at", FAIL)]), (small, [("", "skipped: needs 99.0 GiB")])],
)
def test_an_error_is_a_row_that_fails_and_too_little_memory_one_that_is_skipped(
    monkeypatch, made, expected
):
    monkeypatch.setattr(runner.Check, "rows", lambda self, here: made(here))
    rows = list(runner.here_and_now("start", TINY))
    assert len(rows) == len(expected)
    for row, (seen, result) in zip(rows, expected, strict=True):
        assert row.seen.startswith(seen)
        assert row.result == result
    if made is boom:
        assert rows[1].figure == "ValueError: broken | here"


def test_a_check_that_is_not_done_in_time_keeps_its_rows_and_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(
        runner,
        "command_of",
        lambda names, here: [
            sys.executable,
            "-c",
            'import time; print(\'ROW {"check": "fp16", "seen": "a", "figure": "b", "result": "pass"}\', flush=True); time.sleep(60)',
        ],
    )
    monkeypatch.setitem(runner.CHECKS, "fp16", runner.Check("8 fp16", "arithmetic:check_fp16", 2))
    result = runner.run("fp16", TINY, tmp_path / "log")
    assert result.rows == (Row("a", "b", PASS), Row("did not end", "stopped after 2 s", FAIL))
    assert result.failed == [result.rows[1]]


def test_results_are_read_back_and_shown_in_the_order_of_the_checks(tmp_path):
    facts = {"device": "a GPU", "driver": "1.2", "memory": ""}
    Result("loss", 4.2, (Row("a|b", "c", PASS), Row("d", "", "skipped: why")), facts).write(
        tmp_path
    )
    Result("start", 1.0, (Row("e", "f", FAIL),), facts).write(tmp_path)
    other = {**facts, "device": "another GPU"}
    Result("fp16", 60.0, (Row("g", "h", FIGURE),), other).write(tmp_path)
    results = table.read_all(tmp_path, list(runner.CHECKS))
    assert [one.check for one in results] == ["start", "fp16", "loss"]
    # a header for each machine, once
    assert table.markdown(results, runner.TITLES).splitlines() == [
        "- device: a GPU",
        "- driver: 1.2",
        "- took: 0.1 minutes",
        "- failed: 1 of 3 rows",
        "",
        "| check | what was seen | figure | result |",
        "|---|---|---|---|",
        "| 1 start (1 s) | e | f | **fail** |",
        "| loss at V = 128k (4 s) | a\\|b | c | pass |",
        "|  | d |  | skipped: why |",
        "",
        "- device: another GPU",
        "- driver: 1.2",
        "- took: 1.0 minutes",
        "- failed: 0 of 1 rows",
        "",
        "| check | what was seen | figure | result |",
        "|---|---|---|---|",
        "| 8 fp16 (60 s) | g | h | figure |",
    ]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_into(page, "new")
    assert page.read_text() == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter\n"
    table.write_into(page, table.markdown([], runner.TITLES))
    assert "no GPU has run the checks yet" in page.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no marks"):
        table.write_into(page, "new")


def test_the_page_of_the_docs_takes_a_table_and_names_every_check():
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert table.BEGIN in text
    assert table.END in text
    for name in runner.CHECKS:
        assert f"`{name}`" in text


# Names of kernels


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false>>",
            "flash",
        ),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits>(Flash_bwd_params)",
            "flash",
        ),
        (
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
            "efficient",
        ),
        ("fmha_cutlassB_f16_aligned_64x64_k64_dropout_sm80", "efficient"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
            "cudnn",
        ),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", None),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", None),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", None),
    ],
)
def test_kernels_of_attention_are_known_by_their_names(name, kind):
    assert kernels.kernel_kind(name) == kind


def test_operators_of_attention_are_known_and_those_that_make_scores_are_slow():
    names = [
        "aten::mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_attention_math",
    ]
    assert kernels.operators_of(names) == {"flash", "math"}
    assert set(kernels.SLOW) <= set(kernels.OPERATORS.values())
    assert (
        kernels.short("void pytorch_flash::flash_fwd_kernel<Traits<1>>(Params)")
        == "pytorch_flash::flash_fwd_kernel"
    )


def test_copies_beside_kernels_are_counted_and_their_streams_told_apart():
    def event(category, name, begin, length, stream):
        return {
            "cat": category,
            "name": name,
            "ts": begin,
            "dur": length,
            "args": {"stream": stream},
        }

    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 2, 13),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 2, 13),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 9, 1, 7),
        event("kernel", "gemm", 4, 2, 7),
        event("cpu_op", "aten::mm", 0, 9, 1),
    ]
    copies = kernels.copies_to_device(events)
    ran = [one for one in events if one["cat"] == "kernel"]
    assert len(copies) == 2
    assert (kernels.streams_of(copies), kernels.streams_of(ran)) == ({13}, {7})
    assert kernels.at_once(copies, ran) == 1
