"""`ingest` + `shard` against `datasets`' `map(batched=True)`: one machine, one run, one tokenizer.

    python tests/bench/bench_shard.py [--gigabyte] [--repeat 3] [--format jsonl|csv] [--ray]

Texts are made of real reviews, so that lengths and vocabulary are real. Each measurement is a fresh
process with empty caches, timed after its imports; contestants take turns. Peak memory is the
summed PSS of the process tree; processor time, of the whole tree with its imports, tells on a busy
machine what the wall clock does not.

    rekindle   reads, checks, hashes, splits, tokenizes, writes shards with a manifest
    datasets   load_dataset, map(batched=True, num_proc=cores) as documented, save_to_disk
    tuned      the same with a faster tokenize function in map: `encode_batch_fast`, ids only
    ray        Ray Data: read_json, map_batches, write_parquet, with that faster function; its
               cluster is there before the clock starts. `.venv-clusters/bin/python` has Ray

The ratio that counts is the one to `datasets`; Ray's own processes make its processor time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

REVIEWS = Path("configs/data/reviews.jsonl"), Path("../shared/data/reviews.jsonl")
MAX_LENGTH = 128
CONTESTANTS = ("rekindle", "datasets", "tuned")


def make_corpus(path: Path, size: int) -> int:
    """A file of about `size` bytes of reviews, each continued with words of others and with two
    that stand nowhere else (as three in a hundred words of large corpora do); returns its rows."""
    reviews = [
        json.loads(line) for line in next(p for p in REVIEWS if p.exists()).open(encoding="utf-8")
    ]
    words = [word for review in reviews for word in review["text"].split()]
    draw, rows = random.Random(0), 0
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        if path.suffix == ".csv":
            table.writerow(["text", "label"])
        while file.tell() < size if rows % 1000 == 0 else True:
            start = draw.randrange(len(words) - 60)
            review = reviews[rows % len(reviews)]
            rare = [f"{draw.getrandbits(40):x}" for _ in range(2)]
            text = " ".join([review["text"], *rare, *words[start : start + draw.randint(10, 60)]])
            if path.suffix == ".csv":
                table.writerow([text, review["label"]])
            else:
                file.write(json.dumps({"text": text, "label": review["label"]}) + "\n")
            rows += 1
    return rows


def make_tokenizer(corpus: Path, folder: Path) -> None:
    """A WordPiece tokenizer of 8,192 entries, in Hugging Face layout."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=8192, special_tokens=special, show_progress=False
    )
    with corpus.open(encoding="utf-8") as file:
        tokenizer.train_from_iterator(
            (line for line, _ in zip(file, range(20_000), strict=False)), trainer
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run_rekindle(corpus: Path, tokenizer: Path, out: Path) -> tuple[float, int]:
    import pyarrow.csv
    import pyarrow.json  # noqa: F401 - imports are not what is measured
    import transformers  # noqa: F401

    from rekindle.data.ingest import ingest
    from rekindle.data.shard import shard
    from rekindle.spec.model import DataSpec, ModelSpec

    data = DataSpec(source=str(corpus), max_length=MAX_LENGTH)
    model = ModelSpec(source={"model_type": "distilbert"}, tokenizer=str(tokenizer))
    start = time.perf_counter()
    ingest(data, "text", "", out / "examples")
    manifest = shard(out / "examples", data, model, "text_classification", out / "shards")
    return time.perf_counter() - start, sum(file.tokens for file in manifest.shards)


def run_datasets(corpus: Path, tokenizer: Path, out: Path, *, tuned: bool) -> tuple[float, int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    whole = AutoTokenizer.from_pretrained(tokenizer)
    fast = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    fast.enable_truncation(MAX_LENGTH)

    def tokenize(batch):
        if tuned:
            return {"input_ids": [row.ids for row in fast.encode_batch_fast(batch["text"])]}
        return whole(batch["text"], truncation=True, max_length=MAX_LENGTH)

    start = time.perf_counter()
    kind = "csv" if corpus.suffix == ".csv" else "json"
    rows = datasets.load_dataset(
        kind, data_files=str(corpus), split="train", cache_dir=str(out / "cache")
    )
    encoded = rows.map(
        tokenize, batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=["text"]
    )
    encoded.save_to_disk(str(out / "saved"))
    seconds = time.perf_counter() - start
    column = encoded.with_format("arrow")[:]["input_ids"]
    return seconds, sum(len(chunk.values) for chunk in column.chunks)


def run_ray(corpus: Path, tokenizer: Path, out: Path) -> tuple[float, int]:
    waits = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_request_timeout_seconds")
    os.environ |= dict.fromkeys(waits, "300")  # on a busy machine
    import pyarrow.parquet
    import ray
    import ray.data
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=len(os.sched_getaffinity(0)))
    ray.data.DataContext.get_current().enable_progress_bars = False
    fast = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    fast.enable_truncation(MAX_LENGTH)

    def tokenize(batch):
        ids = [row.ids for row in fast.encode_batch_fast(list(batch["text"]))]
        return pyarrow.table({"input_ids": ids, "label": batch["label"]})

    start = time.perf_counter()
    read = ray.data.read_csv if corpus.suffix == ".csv" else ray.data.read_json
    read(str(corpus)).map_batches(tokenize, batch_size=1_000).write_parquet(str(out / "saved"))
    seconds = time.perf_counter() - start
    saved = pyarrow.parquet.read_table(out / "saved", columns=["input_ids"])
    return seconds, sum(len(chunk.values) for chunk in saved.column(0).chunks)


def tree_seconds() -> float:
    """Processor time of this process and of all below it, those that ended included."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in tree)


def measure(contestant: str, corpus: Path, tokenizer: Path, scratch: Path) -> dict[str, float]:
    """One run in a fresh process: its seconds, tokens, and the peak of the summed PSS of its tree
    in MB."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [
        sys.executable,
        __file__,
        "--child",
        contestant,
        str(corpus),
        str(tokenizer),
        str(out),
    ]
    environment = {
        **os.environ,
        "HF_HOME": str(out / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": ".",
    }
    before = cpu_seconds()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        peak, stop = [0.0], threading.Event()
        sampler = threading.Thread(target=sample_pss, args=(process.pid, peak, stop))
        sampler.start()
        answer, _ = process.communicate()
        stop.set()
        sampler.join()
    if process.returncode:
        sys.exit(f"{contestant} failed")
    found = json.loads(answer.splitlines()[-1])
    return {"cpu_seconds": cpu_seconds() - before, **found, "peak_mb": peak[0] / 1e6}


def cpu_seconds() -> float:
    """Processor time of all child processes so far, their imports included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sample_pss(pid: int, peak: list[float], stop: threading.Event) -> None:
    """Keep the highest sum of proportional set sizes over a process and all below it."""
    while not stop.wait(0.05):
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        peak[0] = max(peak[0], sum(pss_bytes(process.pid) for process in tree))


def pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0
    )


def child(contestant: str, corpus: str, tokenizer: str, out: str) -> None:
    paths = Path(corpus), Path(tokenizer), Path(out)
    more = {}
    if contestant == "rekindle":
        seconds, tokens = run_rekindle(*paths)
    elif contestant == "ray":
        seconds, tokens = run_ray(*paths)
        more["cpu_seconds"] = tree_seconds()  # its daemons outlive this process
    else:
        seconds, tokens = run_datasets(*paths, tuned=contestant == "tuned")
    print(json.dumps({"seconds": seconds, "tokens": tokens, **more}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabyte", action="store_true", help="1 GB of input, one repetition")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--format", choices=("jsonl", "csv"), default="jsonl")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--ray", action="store_true", help="Ray Data, too")
    parser.add_argument("--child", nargs=4)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    megabytes = 1000 if options.gigabyte else options.megabytes
    repeat = options.repeat or (1 if options.gigabyte else 3)
    names = [*options.contestants.split(","), *(["ray"] if options.ray else [])]
    with tempfile.TemporaryDirectory(prefix="bench-shard-") as folder:
        scratch = Path(folder)
        corpus, tokenizer = scratch / f"corpus.{options.format}", scratch / "tokenizer"
        rows = make_corpus(corpus, megabytes * 1_000_000)
        make_tokenizer(corpus, tokenizer)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(repeat):
            for name in names:
                runs[name].append(measure(name, corpus, tokenizer, scratch))
                print(line(name, runs[name][-1], megabytes), file=sys.stderr, flush=True)
    report(megabytes, rows, runs)


def line(name: str, run: dict[str, float], megabytes: int) -> str:
    rate = megabytes / run["seconds"]
    times = f"{run['seconds']:7.2f} s  {rate:5.1f} MB/s  {run['cpu_seconds']:7.1f} s of processors"
    return f"{name:9} {times}  peak {run['peak_mb']:5.0f} MB"


def report(megabytes: int, rows: int, runs: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and the peer's time over ours: wall and processor."""
    keys = ("seconds", "cpu_seconds", "peak_mb", "tokens")
    found = {
        name: {key: statistics.median(run[key] for run in of) for key in keys}
        for name, of in runs.items()
    }
    assert len({of["tokens"] for of in found.values()}) == 1, f"not the same work: {found}"
    tokens, cores = found["rekindle"]["tokens"], len(os.sched_getaffinity(0))
    print(f"shard: {megabytes} MB, {rows:,} rows, {tokens:,.0f} tokens, {cores} cores")
    for name, of in found.items():
        for key in ("seconds", "cpu_seconds"):
            of[f"{key}_ratio"] = of[key] / found["rekindle"][key]
        ratios = f"ratio {of['seconds_ratio']:.2f}, of processor time {of['cpu_seconds_ratio']:.2f}"
        print(f"{line(name, of, megabytes)}  {ratios}")
    print(json.dumps({"bench": "shard", "megabytes": megabytes, "rows": rows, **found}))


if __name__ == "__main__":
    main()
