"""The time model against published speeds, and what must hold of it everywhere."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.catalog.machines import gpu
from rekindle.errors import RequestError
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import profile_of
from rekindle.plan.steptime import step_time
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout
from tests.plan.fit import fit, left_out, mape
from tests.plan.measured import decoder, gpu_of, read_rows
from tests.plan.validate import error, report

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "llm-foundry-throughput.csv"
needs_rows = pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED} is not here")
HEADER = (
    "model,layers,d_model,heads,kv_heads,ffn,vocab,gated,seq_len,gpus,gpus_per_node,gpu,tp,pp,vp,"
    "cp,sharding,micro_batch,grad_accum,activation_checkpointing,precision,compile,"
    "tokens_per_sec_per_gpu"
)
SEVEN_B = decoder(32, 4096, 32, 32, 11008, 32000, gated=True)


def work(layout, **more):
    return Work(SEVEN_B, layout, **({"accumulation": 1, "sequence": 2048} | more))


def seconds(job, nodes=1, inside=450e9, between=400e9):
    cluster = Cluster(gpu("H100"), 8, nodes, inside, between)
    return step_time(job, cluster, profile_of("H100").constants)


@pytest.fixture(scope="module")
def rows():
    return [row for row in read_rows(PUBLISHED) if row.work.precision == "bf16"]


@needs_rows
def test_rows_that_nothing_was_fitted_to_are_predicted_within_four_percent(rows):
    assert len(rows) == 209
    assert mape(map(error, rows[1::2])) <= 4.0


@needs_rows
@pytest.mark.slow
def test_the_constants_are_what_the_fit_finds(rows):
    found = fit(rows[::2])
    for row in rows[:10]:
        assert found.error(row) == pytest.approx(error(row), abs=2e-3)


@needs_rows
@pytest.mark.slow
def test_model_sizes_that_were_left_out_are_predicted_within_five_and_a_half_percent(rows):
    errors = [e for size in left_out(rows).values() for e in size]
    assert len(errors) == 209
    assert mape(errors) <= 5.5


@needs_rows
def test_the_command_prints_every_row_and_tells_the_gpus_and_fp8_apart():
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.validate", PUBLISHED, "--even-odd"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "predicted" in line]) == 216
    summaries = [line.split("  ")[0] for line in lines if "MAPE" in line]
    for name in ("all but fp8", "odd rows", "H100", "A100", "A100-80GB", "fp8"):
        assert name in summaries


def test_a_row_of_our_columns_is_read_with_defaults_for_what_is_empty(tmp_path):
    path = tmp_path / "rows.csv"
    line = (
        "7b,32,4096,32,,11008,32000,true,4096,16,,NVIDIA H100 80GB HBM3,2,,,,hsdp,2,,full,,yes,8000"
    )
    path.write_text(f"{HEADER}\n{line}\n")
    (row,) = read_rows(path)
    assert row.work.layout == Layout(dp=2, shard=4, tp=2, micro_batch_size=2)
    assert (row.work.accumulation, row.work.precision, row.work.compile) == (1, "bf16", True)
    assert (row.work.checkpointing, row.work.shape.kv_heads) == ("full", 32)
    assert (row.cluster.gpus_per_node, row.cluster.nodes, row.cluster.gpu.name) == (8, 2, "H100")
    assert row.work.shape.gated
    assert any("7b 16 x H100" in line for line in report([row]))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a100_40gb", "A100"),
        ("a100_80gb", "A100-80GB"),
        ("A100-80GB", "A100-80GB"),
        ("h100_80gb", "H100"),
        ("H200", "H200"),
        ("A100-SXM4-40GB", "A100"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_names_of_gpus_as_others_write_them(text, name):
    assert gpu_of(text).name == name


def test_rows_that_cannot_be_read_are_all_named(tmp_path):
    path = tmp_path / "rows.csv"
    good = "7b,32,4096,32,,,32000,,2048,8,,H100,,,,,,,,,,,8000"
    bad = [good.replace("H100", "X9"), good.replace("8,,H100,,", "8,,H100,3,"), "7b,x"]
    path.write_text("\n".join([HEADER, good, *bad]) + "\n")
    with pytest.raises(RequestError) as caught:
        read_rows(path)
    assert [p.where.rpartition(":")[2] for p in caught.value.problems] == ["3", "4", "5"]


def test_a_ring_uses_the_nics_that_its_ranks_share():
    cluster = Cluster(gpu("H100"), 8, 2, 400e9, 200e9)
    assert cluster.group(16, 1).bytes_per_second == 200e9
    assert cluster.group(2, 8).bytes_per_second == 25e9
    assert cluster.group(8, 1).bytes_per_second == 400e9
    assert cluster.group(4, 4) == dataclasses.replace(cluster.group(4, 4), nodes=2, size=4)


def test_tensor_parallel_between_nodes_is_slower_than_inside():
    inside = seconds(work(Layout(dp=2, tp=8)), nodes=2)
    across = seconds(work(Layout(tp=16)), nodes=2, between=50e9)
    assert across.terms["tensor parallel"] > 3 * inside.terms["tensor parallel"]


SMALL = decoder(6, 768, 12, 12, 3072, 32000, gated=False)


def small(layout, **more):
    return Work(SMALL, layout, **({"accumulation": 1, "sequence": 128} | more))


def test_the_host_is_what_a_small_model_waits_for():
    assert seconds(small(Layout(dp=8))).dominant == "waiting for the host"
    assert "waiting for the host" not in seconds(work(Layout(shard=8))).terms
    alone, again = (
        seconds(small(Layout(dp=8), checkpointing=how)).seconds for how in ("none", "full")
    )
    assert again > 1.2 * alone, "computing again has to be launched, too"


def test_what_is_exchanged_fills_the_wait_for_the_host():
    slow = seconds(small(Layout(dp=8)), inside=225e9)
    fast = seconds(small(Layout(dp=8)))
    assert "weights and gradients" not in fast.terms, "all of it"
    assert slow.terms["waiting for the host"] == fast.terms["waiting for the host"]
    assert slow.terms["weights and gradients"] > 0, "what does not fit"
    sharded = seconds(small(Layout(shard=8)))
    assert sharded.terms["waiting for the host"] > fast.terms["waiting for the host"]


def test_data_are_waited_for_where_they_take_longer_to_prepare_than_a_step_takes():
    known = profile_of("H100").constants
    cluster = Cluster(gpu("H100"), 8, 1, 450e9, 400e9)
    job = small(Layout(dp=8))
    plain = step_time(job, cluster, known)
    assert "waiting for data" not in plain.terms
    slow = step_time(job, cluster, dataclasses.replace(known, data_seconds=1e-3))
    assert slow.seconds == pytest.approx(1e-3 * 128)
    assert slow.terms["waiting for data"] == pytest.approx(slow.seconds - plain.seconds)
