"""One's own code counts: a pipeline, a task class and an existing torchrun script, each from an empty folder."""

import json
import textwrap

import numpy as np
import pytest


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def folder(cli, tmp_path):
    cli.folder = tmp_path
    return tmp_path


@pytest.mark.slow
def test_a_pipeline_of_ones_own(cli, folder):
    write(
        folder,
        "mine.py",
        """
        from kfp import dsl


        @dsl.component(base_image="python:3.11", install_kfp_package=False)
        def count(text: str, words: dsl.Output[dsl.Artifact]) -> int:
            with open(words.path, "w") as file:
                file.write(text)
            return len(text.split())


        @dsl.component(base_image="python:3.11", install_kfp_package=False)
        def praise(number: int, words: dsl.Input[dsl.Artifact]) -> str:
            return f"{number} words: {open(words.path).read()}"


        @dsl.pipeline(name="mine")
        def mine(text: str, limit: int = 2) -> str:
            counted = count(text=text)
            with dsl.If(counted.outputs["Output"] > limit):
                praise(number=counted.outputs["Output"], words=counted.outputs["words"])
            return praise(number=counted.outputs["Output"], words=counted.outputs["words"]).output
    """,
    )
    write(
        folder,
        "mine.yaml",
        """
        name: mine
        task: text_classification
        pipeline: mine.py:mine
        arguments: {text: "one two three"}
    """,
    )
    result = cli.json("run", "mine.yaml")
    assert result["status"] == "succeeded"
    assert [s["status"] for s in result["steps"]] == ["succeeded"] * 3
    record = json.loads((folder / ".rekindle" / "runs" / result["run_id"] / "run.json").read_text())
    assert record["steps"][-1]["parameters"]["Output"] == "3 words: one two three"
    assert result["gate"] is None
    few = cli.json("run", "mine.yaml", "--set", "arguments.text=one")
    assert "skipped" in {s["status"] for s in few["steps"]}


@pytest.mark.slow
def test_a_task_class_of_ones_own(cli, folder):
    """Nearest centroid by gradient descent on raw pixels: a linear model in 40 lines, saved, judged, registered, loaded."""
    write(
        folder,
        "linear.py",
        """
        import numpy as np
        import pyarrow as pa

        from rekindle import Task


        class Linear(Task):
            modality = "image"

            def encode(self, batch, settings, assets):
                return {"pixels": batch.column("image")}

            def build(self, model, labels, settings, assets):
                import torch

                height, width, depth = settings["image_shape"]
                return torch.nn.Linear(height * width * depth, len(labels))

            def collate(self, rows, settings):
                import torch

                raw = np.frombuffer(b"".join(rows.column("pixels").to_pylist()), np.uint8)
                return {"x": torch.from_numpy(raw.reshape(len(rows), -1).astype(np.float32) / 255)}

            def logits(self, network, inputs):
                return network(inputs["x"])

            def save(self, network, folder, labels, settings):
                from safetensors.torch import save_file

                save_file(network.state_dict(), folder / "model.safetensors")

            def load(self, folder):
                import torch
                from safetensors.torch import load_file

                tensors = load_file(folder / "model.safetensors")
                network = torch.nn.Linear(tensors["weight"].shape[1], tensors["weight"].shape[0])
                network.load_state_dict(tensors)
                return network.eval()
    """,
    )
    write(
        folder,
        "linear.yaml",
        """
        name: linear
        task: linear.py:Linear
        data: {source: "sklearn:digits"}
        train: {epochs: 5, lr: 1e-2}
        evaluate: {floor: {accuracy: 0.8}}
    """,
    )
    result = cli.json("run", "linear.yaml")
    assert result["gate"]["promoted"] is True
    assert result["metrics"]["accuracy"] >= 0.8


@pytest.mark.slow
def test_an_existing_torchrun_script(cli, folder):
    """A script that knows nothing of rekindle but its three folders, in a DDP of its own."""
    write(
        folder,
        "train.py",
        """
        import argparse
        import os
        from pathlib import Path

        import numpy as np
        import pyarrow as pa
        import torch
        import torch.distributed as dist
        from safetensors.torch import save_file

        parser = argparse.ArgumentParser()
        parser.add_argument("--data"), parser.add_argument("--out"), parser.add_argument("--epochs", type=int)
        parser.add_argument("--ckpt")
        args = parser.parse_args()
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        files = sorted(Path(args.data).rglob("*train*.arrow"))
        table = pa.concat_tables([pa.ipc.open_file(str(f)).read_all() for f in files])
        x = np.frombuffer(b"".join(table.column("pixels").to_pylist()), np.uint8).reshape(len(table), -1)
        x, y = torch.tensor(x / 255.0, dtype=torch.float32), torch.tensor(table.column("label").to_numpy(), dtype=torch.long)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(x.shape[1], 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for epoch in range(args.epochs):
            for part in torch.arange(rank, len(x) - world, world).split(64):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
        Path(args.ckpt, f"seen-{rank}").write_text(str(world))
        if rank == 0:
            save_file(model.module.state_dict(), Path(args.out) / "model.safetensors")
        dist.destroy_process_group()
    """,
    )
    write(
        folder,
        "load.py",
        """
        from rekindle.tasks.image_classification import ImageClassification


        class Flat(ImageClassification):
            def check(self, data, model):
                pass

            def logits(self, network, inputs):
                return network((inputs["pixels"].flatten(1) + 1) / 2)

            def load(self, folder):
                import torch
                from safetensors.torch import load_file

                tensors = load_file(folder / "model.safetensors")
                network = torch.nn.Linear(*reversed(tensors["weight"].shape))
                network.load_state_dict(tensors)
                return network.eval()
    """,
    )
    write(
        folder,
        "script.yaml",
        """
        name: script
        task: load.py:Flat
        data: {source: "sklearn:digits"}
        train: {entrypoint: "train.py --data {data} --out {model} --ckpt {checkpoints} --epochs 20"}
        evaluate: {floor: {accuracy: 0.8}}
    """,
    )
    result = cli.json("run", "script.yaml")
    assert result["gate"]["promoted"] is True, result
    seen = sorted(p.name for p in (folder / ".rekindle" / "checkpoints").rglob("seen-*"))
    assert seen == ["seen-0", "seen-1"], "both ranks had the same checkpoint folder"
    script = folder / "train.py"
    script.write_text(script.read_text() + "# changed\n")
    changed = cli.json("run", "script.yaml")
    assert not next(s for s in changed["steps"] if s["name"] == "finetune")["cached"], (
        "another script is other work"
    )
    assert np.isclose(changed["metrics"]["accuracy"], result["metrics"]["accuracy"])

    def model_of(run):
        found = (folder / ".rekindle").rglob("rekindle.json")
        return next(p.parent for p in found if run["run_key"] in p.read_text())

    before = model_of(changed)
    known = np.union1d(np.load(before / "trained_on.npy"), np.array([7, 9], np.uint64))
    np.save(before / "trained_on.npy", known)
    after = cli.json("run", "script.yaml", "--set", f"model.init_from={before}")
    assert np.array_equal(np.load(model_of(after) / "trained_on.npy"), known)
