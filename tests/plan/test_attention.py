"""Kernels of attention against their published speeds, and what else differs between softwares."""

import csv
import dataclasses
import statistics
from pathlib import Path

import pytest

from rekindle.catalog.machines import gpu
from rekindle.plan.attention import WRITTEN, written_seconds
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import profile_of
from rekindle.plan.steptime import traffic
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout
from tests.plan.fit import mape
from tests.plan.measured import decoder, read_rows
from tests.plan.stacks import MOVED, Software, StackWork, step_time
from tests.plan.validate import error, report

POINTS = Path(__file__).parent / "rows" / "attention.csv"
SEVEN_B = decoder(32, 4096, 32, 32, 11008, 32000, gated=True)


def _points():
    with POINTS.open(newline="") as file:
        return list(csv.DictReader(file))


def _off(point):
    """Of a point of the table, what the constants say of it over what was published, less one."""
    constants, peak = profile_of(point["gpu"]).constants, gpu(point["gpu"]).tflops["bf16"] * 1e12
    forward, backward = constants.kernels[point["kernel"]].seconds(
        1e12, int(point["seq_len"]), peak, int(point["head_dim"]), point["causal"] == "yes"
    )
    tflops = 1 / forward if point["pass"] == "forward" else 2.5 / backward
    return tflops / float(point["tflops"]) - 1


def _terms(layout=None, name="H100", shape=SEVEN_B, sequence=4096, **more):
    software = Software(**{k: v for k, v in more.items() if k in Software.__dataclass_fields__})
    rest = {k: v for k, v in more.items() if k not in Software.__dataclass_fields__}
    work = StackWork(shape, layout or Layout(), 1, sequence, software=software, **rest)
    cluster = Cluster(gpu(name), 8, 1, 450e9, 400e9)
    return step_time(work, cluster, profile_of(name).constants).terms


def test_kernels_reach_what_was_published_of_them():
    points = _points()
    assert len(points) == 120
    assert statistics.mean(abs(_off(point)) for point in points) < 0.06
    # what a backward pass and its mask cost, which training consists of for the most part
    causal = [
        p
        for p in points
        if p["head_dim"] == "128" and p["gpu"] != "H200"
        if p["causal"] == "yes" or p["pass"] == "backward"
    ]
    assert max(abs(_off(point)) for point in causal) < 0.07
    assert max(abs(_off(point)) for point in points) < 0.3


def test_a_product_takes_what_is_worked_out_beside_it():
    # 0.193 ms of operations and 0.050 of moving, of each of three products
    square = dataclasses.replace(SEVEN_B.matrices[0], name="q")
    shape = dataclasses.replace(SEVEN_B, layers=1, matrices=(square,), causal=False)
    constants = dataclasses.replace(
        profile_of("H100").constants, matrix_efficiency=0.72, operand_passes=2.0
    )
    cluster = Cluster(gpu("H100"), 8, 1, 450e9, 400e9)
    terms = step_time(Work(shape, Layout(), 1, 4096), cluster, constants).terms
    assert terms["matrix products"] == pytest.approx(3 * 0.243e-3, rel=2e-3)


def test_attention_that_is_written_out_takes_what_is_worked_out_beside_it():
    assert written_seconds(1e12, 128, 256e12, 1.7e12, WRITTEN[False]) == pytest.approx(
        (17.6, 17.6), abs=0.05
    )
    assert written_seconds(1e12, 128, 256e12, 1.7e12, MOVED["unfused", True]) == pytest.approx(
        (7.65, 11.18), abs=0.01
    )


@pytest.mark.parametrize(
    ("slower", "faster"),
    [("unfused", "flash2"), ("flash2", "cudnn"), ("cudnn", "flash3"), ("flash1", "flash2")],
)
def test_kernels_are_in_the_order_of_their_publications(slower, faster):
    times = [_terms(attention=name, sequence=8192)["attention"] for name in (slower, faster)]
    assert times[0] > 1.05 * times[1]


def test_our_engine_writes_attention_out_only_where_ranks_have_to_draw_the_same_dropout():
    wet = dataclasses.replace(SEVEN_B, attention_dropout=0.1)
    assert Work(SEVEN_B, Layout(tp=2), 1, 4096).attention == "flash2"
    assert Work(wet, Layout(dp=2, shard=2), 1, 4096).attention == "flash2"
    assert Work(wet, Layout(tp=2), 1, 4096).attention == "written"
    assert Work(wet, Layout(cp=2), 1, 4096).attention == "written"
    tp = Layout(tp=2)
    assert _terms(tp, shape=wet)["attention"] > 3 * _terms(tp)["attention"]


def test_our_engine_skips_the_masked_half_of_a_divided_sequence():
    encoder = dataclasses.replace(SEVEN_B, causal=False)
    for cp in (1, 2, 4):
        masked, whole = _terms(Layout(cp=cp)), _terms(Layout(cp=cp), shape=encoder)
        assert whole["attention"] > 1.7 * masked["attention"]


def test_a_block_computed_again_stops_before_its_last_product():
    block = SEVEN_B.matrices
    spared = block[-1].inputs * block[-1].outputs / sum(m.inputs * m.outputs for m in block)
    assert spared == pytest.approx(0.223, abs=1e-3)
    ours = _terms(checkpointing="full")
    whole = _terms(checkpointing="full", repeated=1.0)
    products = whole["matrix products"] / 3
    saved = whole["recomputation"] - ours["recomputation"]
    assert 0.15 * products < saved < spared * products


def test_recomputing_attention_alone_costs_its_forward_pass():
    core = _terms(checkpointing="selective", repeated=0.0, core=True, elementwise=False)
    assert 0.15 < core["recomputation"] / core["attention"] < 0.4
    half = _terms(checkpointing="full", blocks=0.5)["recomputation"]
    assert half == pytest.approx(_terms(checkpointing="full")["recomputation"] / 2)


def test_queries_keys_and_values_that_are_one_product_waste_less():
    apart, merged = (
        StackWork(SEVEN_B, Layout(tp=8), 1, 4096, software=Software(merged=m))
        for m in (False, True)
    )
    assert len(apart.factors) == 7
    assert set(merged.factors) == {(4096, 1536), (512, 4096), (4096, 2752), (1376, 4096)}
    products = [_terms(Layout(tp=8), merged=m)["matrix products"] for m in (False, True)]
    assert products[0] > 1.03 * products[1]


def test_what_is_exchanged_beside_computing_costs_less():
    layout = Layout(tp=8)
    alone, beside = _terms(layout), _terms(layout, overlapped=("tp",))
    assert beside["tensor parallel"] < 0.7 * alone["tensor parallel"]
    sharded = Layout(shard=8)
    waits, ahead = _terms(sharded, prefetched=False), _terms(sharded)
    assert ahead["weights and gradients"] < 0.7 * waits["weights and gradients"]


def test_fused_kernels_move_less_than_eager_ones_and_compiled_ones_least():
    eager, fused, compiled = (traffic(SEVEN_B, k) for k in ("eager", "fused", "compiled"))
    assert eager.stream[0] == 2 * 4096 * 40
    assert fused.stream[0] == 2 * 4096 * 10
    assert compiled.stream[0] == 2 * 4096 * 8
    assert eager.inner > fused.inner == compiled.inner
    assert traffic(SEVEN_B, "fused", dropout=True).stream[0] == 2 * 4096 * 11


def test_in_8_bits_what_goes_into_products_is_cast_first():
    wide = sum(m.inputs + m.outputs for m in SEVEN_B.matrices)
    casts = _terms(precision="fp8")["memory traffic"] - _terms()["memory traffic"]
    assert casts == pytest.approx(32 * 4 * 4096 * wide / (3.35e12 * 0.85))


def test_a_row_says_how_its_software_differs(tmp_path):
    lines = [
        "model,layers,d_model,heads,ffn,vocab,seq_len,gpus,gpu,micro_batch,precision,stack,attention,"
        "kernels,prefetch,overlap,dropout,causal,scored,reduce,sequence_parallel,repeated,merged,"
        "activation_checkpointing,watts,memory_gb_per_second,tokens_per_sec_per_gpu",
        "bert,24,1024,16,4096,30528,512,8,H100,8,bf16,a,apart,fused,no,,yes,no,0.15,fp32,no,,yes,,500,2410,9e4",
        "gpt,24,1024,16,4096,30528,512,8,H100,8,bf16,b,,,,,,,,,,attention,,selective,,,9e4",
        "gpt,24,1024,16,4096,30528,512,8,H100,8,bf16,b,,,,,,,,,,blocks 0.5,,selective,,,9e4",
    ]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    bert, core, blocks = read_rows(path)
    assert bert.work.software == Software(
        attention="apart",
        kernels="fused",
        prefetched=False,
        scored=0.15,
        reduced_bytes=4,
        sequence=False,
        merged=True,
    )
    assert not bert.work.shape.causal
    assert bert.work.shape.attention_dropout > 0
    assert bert.cluster.gpu.bandwidth_bytes_per_second == 2410e9
    assert bert.cluster.gpu.tflops["bf16"] == pytest.approx(989 * (5 / 7) ** (1 / 3))
    software = core.work.software
    assert (software.attention, software.repeated, software.core) == ("flash2", 0.0, True)
    assert not software.elementwise
    assert (blocks.work.checkpointing, blocks.work.software.blocks) == ("full", 0.5)
    assert any(line.startswith("mean over 2 stacks") for line in report([bert, core, blocks]))


def test_rows_of_stacks_that_nothing_is_fitted_to_are_no_further_off_than_they_were():
    rows = [r for r in read_rows(POINTS.with_name("other-stacks.csv")) if r.work.precision != "fp8"]
    assert len(rows) == 221
    assert mape(map(error, rows)) < 12.5


def test_an_output_head_that_sees_a_share_of_the_tokens_costs_that_share():
    encoder = dataclasses.replace(SEVEN_B, causal=False)
    none, some, more = (
        _terms(shape=encoder, sequence=65_536, scored=share)["matrix products"]
        for share in (None, 0.5, 1.0)
    )
    assert more - none == pytest.approx(2 * (some - none), rel=0.02)
    assert some > none
