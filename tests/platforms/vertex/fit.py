"""A distributed step without torch: its nodes meet over TCP, and node rank 0 writes a model."""

from kfp import dsl

import rekindle


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def fit(  # noqa: C901 - a component is one function
    data: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model], folder: str, behave: str, item: str
) -> bool:
    import os
    import socket
    import sys
    import time
    from pathlib import Path

    from rekindle.launch.rendezvous import Rendezvous

    place, notes = Rendezvous.current(), Path(folder)
    rank = place.node_rank
    attempt = len(list(notes.glob(f"attempt-*-node-{rank}"))) + 1
    (notes / f"attempt-{attempt}-node-{rank}").write_text(os.environ.get("HF_TOKEN", ""))
    told = [*behave.split(","), "ok"][attempt - 1]
    print(f"attempt {attempt} of node {rank} is told: {told}")
    while len(list(notes.glob(f"attempt-{attempt}-node-*"))) < place.nodes:
        time.sleep(0.02)  # so that every node counts every attempt
    while told == "wait" and not (notes / "go").exists():
        time.sleep(0.02)
    if told == "fail":
        raise ValueError(f"attempt {attempt} is bad")
    if told == "preempt" or (told == "alone" and rank == 0):
        Path(model.path).write_text("half a model")
        sys.exit(75)
    if rank:
        while True:
            try:
                with socket.create_connection((place.address, place.port), 1) as peer:
                    peer.sendall(str(rank).encode())
                    peer.recv(1)
                break
            except OSError:
                time.sleep(0.02)
    heard = []
    if rank == 0:
        with socket.create_server((place.address, place.port)) as server:
            while len(heard) < place.nodes - 1:
                peer, _ = server.accept()
                heard.append(int(peer.recv(9)))
                peer.close()
    rows = Path(data.path).read_text().split()
    if told == "elsewhere":
        model.custom_path = str(notes / f"model-{rank}")
    Path(model.path).write_text(f"{len(rows)} rows, heard of {heard}")
    model.metadata["nodes"] = place.nodes
    return True


SCRIPT = """# {{$ is none of a placeholder
cat "$0" > "$1"
echo "$1" >> "$2/places"
until [ "$(wc -l < "$2/places")" = 2 ]; do sleep 0.02; done
printf true > "$3"
echo run "$4"
"""


@dsl.container_component
def shell(
    data: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    folder: str,
    item: str,
    done: dsl.OutputPath(bool),
):
    return dsl.ContainerSpec(
        image="python:3.12-slim",
        command=["sh", "-c", SCRIPT],
        args=[data.path, model.path, folder, done, dsl.PIPELINE_JOB_NAME_PLACEHOLDER],
    )


@dsl.pipeline(name="fits")
def fits(folder: str = "", behave: str = "ok", item: str = "a"):
    data = dsl.importer(artifact_uri="gs://bucket/data.csv", artifact_class=dsl.Dataset).output
    rekindle.distribute(
        fit(data=data, folder=folder, behave=behave, item=item), nodes=2, max_run_hours=2.0
    )
    rekindle.distribute(shell(data=data, folder=folder, item=item), nodes=2)
    again = fit(data=data, folder=folder, behave=behave, item="b").set_retry(1)
    rekindle.distribute(again, nodes=2, spot=True, checkpoint="folder")
