"""The published figures that the planner is judged by: each has a source, and adds up."""

import csv
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

ROWS = Path(__file__).parent / "rows"
DATE = r"20\d\d(-\d\d(-\d\d)?)?"
LEGAL = {
    "gpu": {"A100-40GB", "A100-80GB", "H100", "H200", "L4", "V100"},
    "gated": {"yes", "no"},
    "sharding": {"", "ddp", "fsdp", "hsdp", "distributed_optimizer"},
    "activation_checkpointing": {"", "none", "selective", "full"},
    "precision": {"", "bf16", "fp16", "fp8"},
    "compile": {"", "yes", "no"},
    "attention": {"", "flash1", "flash2", "flash3", "cudnn", "unfused", "apart"},
    "kernels": {"", "eager", "fused", "compiled"},
    "overlap": {"", "tp", "cp", "tp cp"},
    "reduce": {"", "bf16", "fp32"},
    "prefetch": {"", "no"},
    "dropout": {"", "yes"},
    "causal": {"", "no"},
    "sequence_parallel": {"", "no"},
    "merged": {"", "yes"},
}
SHAPE = ["layers", "d_model", "heads", "kv_heads", "ffn", "vocab", "seq_len"]
LAYOUT = ["gpus", "gpus_per_node", "tp", "pp", "cp"]


def _converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rows_convert", ROWS / "convert.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _read(name: str) -> list[dict[str, str]]:
    with (ROWS / name).open(newline="") as file:
        return list(csv.DictReader(file))


convert = _converter()
TRAINING = _read("other-stacks.csv")
NCCL = _read("nccl.csv")
ATTENTION = _read("attention.csv")


def _named(rows: Iterable[dict[str, str]]) -> dict[str, dict[str, str]]:
    """Each row under its line and what it is, so that a failure says which line to mend."""
    return {f"line {line}: {list(row.values())}": row for line, row in enumerate(rows, start=2)}


def _whole(value: str) -> bool:
    return value.isdigit() and int(value) > 0


def test_there_are_rows_of_many_stacks_and_none_of_the_one_that_the_model_is_fitted_on() -> None:
    stacks = {row["stack"] for row in TRAINING}
    assert len(TRAINING) >= 40
    assert len(stacks) >= 6
    assert not {stack for stack in stacks if "foundry" in stack or "mosaic" in stack}


@pytest.mark.parametrize("rows", [TRAINING, NCCL, ATTENTION], ids=["training", "nccl", "attention"])
def test_every_row_says_where_it_is_from_and_of_when(rows: list[dict[str, str]]) -> None:
    for where, row in _named(rows).items():
        assert re.search(r"https://|arXiv \d{4}\.\d{5}", row["source"]), where
        assert re.fullmatch(DATE, row["as_of"]), where


def test_every_row_has_a_whole_shape_and_legal_words() -> None:
    for where, row in _named(TRAINING).items():
        assert all(_whole(row[key]) for key in SHAPE + LAYOUT), where
        for key in ("vp", "micro_batch", "grad_accum"):
            assert row[key] == "" or _whole(row[key]), where
        for key, words in LEGAL.items():
            assert row[key] in words, f"{key}={row[key]!r} in {where}"
        assert int(row["d_model"]) % int(row["heads"]) == 0, where
        assert int(row["heads"]) % int(row["kv_heads"]) == 0, where


def test_what_is_computed_again_is_said_in_one_of_three_ways() -> None:
    for where, row in _named(TRAINING).items():
        assert re.fullmatch(r"(|attention|(blocks )?(0\.\d+|1))", row["repeated"]), where
        assert not row["repeated"] or row["activation_checkpointing"] in ("selective", "full"), (
            where
        )


def test_every_layout_fits_its_gpus_and_its_layers() -> None:
    for where, row in _named(TRAINING).items():
        ranks = int(row["tp"]) * int(row["pp"]) * int(row["cp"])
        assert int(row["gpus"]) % ranks == 0, where
        assert int(row["heads"]) % int(row["tp"]) == 0, where
        assert int(row["vp"] or 1) == 1 or int(row["pp"]) > 1, where


def test_a_step_of_a_stated_batch_is_what_micro_batches_make_of_it() -> None:
    for where, row in _named(TRAINING).items():
        stated = re.search(r"of (\d+) sequences", row["reported"])
        if not stated or not row["grad_accum"]:
            continue
        replicas = int(row["gpus"]) // (int(row["tp"]) * int(row["pp"]) * int(row["cp"]))
        batch = replicas * int(row["micro_batch"]) * int(row["grad_accum"])
        assert batch == int(stated[1]), where


def test_what_a_source_reported_converts_to_the_stored_tokens_per_second() -> None:
    for where, row in _named(TRAINING).items():
        stored = float(row["tokens_per_sec_per_gpu"])
        assert convert.tokens_per_sec_per_gpu(row) == pytest.approx(stored, rel=0.01), where


def test_no_row_in_16_bits_is_faster_than_a_gpu_can_be_or_slower_than_any_stack_is() -> None:
    for where, row in _named(TRAINING).items():
        if row["precision"] != "fp8":
            assert 0.05 < convert.mfu(row) < 0.75, f"{convert.mfu(row):.3f} {where}"


def test_no_row_in_8_bits_is_faster_than_the_8_bit_peak_allows() -> None:
    for where, row in _named(TRAINING).items():
        if row["precision"] == "fp8":
            assert 0.05 < convert.mfu(row) / 2 < 0.75, f"{convert.mfu(row):.3f} {where}"


def test_no_peak_of_memory_is_more_than_the_gpu_has() -> None:
    # the H100 of torchtitan's authors has 96 GB
    has_gib = {"A100-40GB": 40, "A100-80GB": 80, "H100": 96, "H200": 141, "V100": 32}
    stated = [row for row in TRAINING if row["peak_memory_gib"]]
    assert len(stated) > 20
    for where, row in _named(stated).items():
        assert 1 < float(row["peak_memory_gib"]) <= has_gib[row["gpu"]], where


def test_the_formulas_give_the_numbers_worked_out_beside_them() -> None:
    smallest = next(row for row in TRAINING if row["model"] == "gpt-1.7b")
    assert convert.narayanan_flops_per_token(smallest) == pytest.approx(1.475e10, rel=1e-3)
    llama = next(row for row in TRAINING if row["model"] == "llama2-7b")
    assert convert.weights(llama) == pytest.approx(6.607e9, rel=1e-3)
    assert convert.flops_per_token(llama) == pytest.approx(4.609e10, rel=1e-3)


def test_a_figure_of_no_known_form_is_refused() -> None:
    with pytest.raises(ValueError, match="has none of the forms"):
        convert.tokens_per_sec_per_gpu({"reported": "148 TFLOPs", "gpus": "8"})


def test_every_bandwidth_is_of_a_known_collective_and_no_more_than_nvlink_with_sharp() -> None:
    for where, row in _named(NCCL).items():
        assert row["collective"] in {"", "all_reduce", "all_gather", "reduce_scatter"}, where
        assert row["collective"] or "does not name the collective" in row["note"], where
        assert row["machine"], where
        assert row["gpu"] in LEGAL["gpu"], where
        assert all(_whole(row[key]) for key in ("nodes", "gpus", "message_bytes")), where
        assert int(row["gpus"]) % int(row["nodes"]) == 0, where
        assert 0 < float(row["busbw_gb_per_s"]) < 500, where
