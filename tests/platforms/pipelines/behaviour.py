# ruff: noqa
"""Pipelines that fail, wait, meet, hang and save, to see how a run behaves."""

# Components are written as users of KFP write them, hence the noqa.

from typing import NamedTuple, Optional

from kfp import dsl, kubernetes

import rekindle

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def meet(folder: str, me: str, other: str) -> str:
    """Ends only if `other` runs at the same time."""
    import os
    import time

    open(os.path.join(folder, me), "w").close()
    for _ in range(400):
        if os.path.exists(os.path.join(folder, other)):
            return "met"
        time.sleep(0.05)
    raise TimeoutError("alone")


@component
def count(folder: str, name: str, value: int = 1) -> int:
    """Says in a file how often it ran."""
    import os

    with open(os.path.join(folder, name), "a") as file:
        file.write("x")
    return value


@component
def make(folder: str, text: str, data: dsl.Output[dsl.Dataset]):
    import os

    with open(os.path.join(folder, "make"), "a") as file:
        file.write("x")
    os.makedirs(os.path.join(data.path, "deep"))
    for name in ("a.txt", "deep/b.txt"):
        with open(os.path.join(data.path, name), "w") as file:
            file.write(text)


@component
def use(folder: str, data: dsl.Input[dsl.Dataset]) -> int:
    import os

    with open(os.path.join(folder, "use"), "a") as file:
        file.write("x")
    return os.path.getsize(os.path.join(data.path, "a.txt"))


@component
def slow_make(folder: str, data: dsl.Output[dsl.Dataset]):
    import os
    import time

    with open(os.path.join(folder, "slow"), "a") as file:
        file.write("x")
    with open(data.path, "w") as file:
        file.write("half")
        file.flush()
        time.sleep(1.0)
        while os.path.exists(os.path.join(folder, "wait")):
            time.sleep(0.01)
        file.write(" whole")


@component
def fail(message: str):
    raise ValueError(message)


@component
def leave(code: int, folder: str = ""):
    import os
    import sys

    if folder:
        open(os.path.join(folder, "left"), "a").close()
    sys.exit(code)


@component
def kill_itself():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


@component
def hang(folder: str):
    """Hangs with a child, and a grandchild in a session of its own; tells process ids and SIGTERM."""
    import os
    import signal
    import subprocess
    import sys
    import time

    def on_term(number, frame):
        open(os.path.join(folder, "terminated"), "w").close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    child = subprocess.Popen(["sleep", "600"])
    nested = (
        "import subprocess as s; p = s.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    )
    deep = subprocess.Popen(
        [sys.executable, "-c", nested], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    pids = [os.getpid(), child.pid, deep.pid, int(deep.stdout.readline())]
    with open(os.path.join(folder, "pids.tmp"), "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(os.path.join(folder, "pids.tmp"), os.path.join(folder, "pids"))
    time.sleep(600)


@component
def stubborn(folder: str):
    """Ignores SIGTERM."""
    import os
    import signal
    import time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.path.join(folder, "pids.tmp"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(folder, "pids.tmp"), os.path.join(folder, "pids"))
    time.sleep(600)


@component
def saves(folder: str):
    """Saves on SIGTERM and leaves with 75."""
    import os
    import signal
    import sys
    import time

    def on_term(number, frame):
        time.sleep(0.3)
        open(os.path.join(folder, "saved"), "w").close()
        sys.exit(75)

    signal.signal(signal.SIGTERM, on_term)
    with open(os.path.join(folder, "pids"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


@component
def speaks():
    import json

    for step in (1, 2):
        print("::rekindle " + json.dumps({"event": "progress", "step": step, "steps": 2}))
    print("::rekindle {broken")
    print("done")


@component
def reads_environment(name: str) -> str:
    import os

    return os.environ.get(name, "")[::-1]


@dsl.component(
    base_image="python:3.11", install_kfp_package=False, packages_to_install=["pydantic>=2"]
)
def satisfied() -> str:
    return "ran"


@dsl.component(
    base_image="python:3.11",
    packages_to_install=["no-such-package==1.2", "pydantic<2"],
    pip_index_urls=["https://example.invalid/simple"],
)
def unsatisfied() -> str:
    return "never"


@dsl.container_component
def shell(text: str, out: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="busybox",
        command=["sh", "-c", 'mkdir -p "$(dirname "$1")"; printf "%s" "$0" > "$1"'],
        args=[dsl.ConcatPlaceholder(["<", text, ">"]), out],
    )


@dsl.container_component
def greets(name: Optional[str] = None, punctuation: str = "!"):
    return dsl.ContainerSpec(
        image="busybox",
        command=["echo"],
        args=[
            dsl.IfPresentPlaceholder(input_name="name", then=["hello,", name], else_=["nobody"]),
            dsl.ConcatPlaceholder([punctuation, "?"]),
        ],
    )


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def elsewhere(folder: str, data: dsl.Output[dsl.Dataset]):
    """Puts its output somewhere else, and says so."""
    import os

    data.custom_path = os.path.join(folder, "elsewhere")
    with open(data.path, "w") as file:
        file.write("moved")


@component
def read_moved(data: dsl.Input[dsl.Dataset]) -> str:
    with open(data.path) as file:
        return file.read()


@component
def silent(out: dsl.OutputPath(str)):
    """Does not write what it promised."""


@dsl.pipeline
def meeting(folder: str):
    meet(folder=folder, me="a", other="b")
    meet(folder=folder, me="b", other="a")


@dsl.pipeline
def chain(folder: str, text: str = "abc"):
    made = make(folder=folder, text=text)
    used = use(folder=folder, data=made.outputs["data"])
    count(folder=folder, name="count", value=used.output)


@dsl.pipeline
def uncached(folder: str):
    first = count(folder=folder, name="first")
    first.set_caching_options(False)
    count(folder=folder, name="second", value=first.output)


@dsl.pipeline
def failing(folder: str, message: str = "no\nluck"):
    bad = fail(message=message)
    with dsl.If(count(folder=folder, name="aside").output == 1):
        count(folder=folder, name="later")
    count(folder=folder, name="dependent").after(bad)


@dsl.pipeline
def failing_beside(folder: str):
    fail(message="early")
    slow_make(folder=folder)


@dsl.pipeline
def killed():
    kill_itself()


@dsl.pipeline
def leaving(folder: str, code: int = 75):
    left = leave(code=code, folder=folder)
    left.set_retry(3, backoff_duration="0s")
    count(folder=folder, name="after").after(left)


@dsl.pipeline
def retrying(folder: str, code: int = 3):
    leave(code=code, folder=folder).set_retry(2, backoff_duration="0s")


@dsl.pipeline
def timing_out(folder: str):
    kubernetes.set_timeout(hang(folder=folder), 4)


@dsl.pipeline
def hanging(folder: str):
    first = count(folder=folder, name="first")
    hang(folder=folder).after(first)


@dsl.pipeline
def stubbornly_hanging(folder: str):
    stubborn(folder=folder)


@dsl.pipeline
def saving(folder: str):
    saves(folder=folder)


@dsl.pipeline
def slow(folder: str):
    slow_make(folder=folder)


@component
def abandons() -> str:
    import atexit
    import io
    import threading
    import time

    import pyarrow
    import pyarrow.csv

    class Slow(io.BytesIO):
        def read(self, *size):
            time.sleep(0.2)
            return super().read(*size)

    source = pyarrow.PythonFile(Slow(b"a\n" + b"1\n" * 1_000_000), mode="r")
    options = pyarrow.csv.ReadOptions(block_size=1 << 16, use_threads=False)
    next(pyarrow.csv.open_csv(source, read_options=options))
    atexit.register(print, "registered", flush=True)
    threading.Thread(target=lambda: (time.sleep(0.1), print("waited for"))).start()
    return "done"


@dsl.pipeline
def abandoning():
    abandons()


@dsl.pipeline
def speaking():
    speaks()


@dsl.pipeline
def environment(name: str) -> str:
    return reads_environment(name=name).output


@dsl.pipeline
def with_packages() -> str:
    return satisfied().output


@dsl.pipeline
def says_its_job() -> str:
    return reads_environment(name=dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER).output


@dsl.pipeline
def without_packages() -> str:
    return unsatisfied().output


@component
def leaves(folder: str, fail: bool):
    from pathlib import Path

    assert not list(Path(folder).iterdir())
    Path(folder, "left.txt").write_text("left")
    assert not fail, "as asked"


@dsl.container_component
def picks_up(text: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="busybox", command=["cp", f"{dsl.WORKSPACE_PATH_PLACEHOLDER}/left.txt", text]
    )


@dsl.pipeline(pipeline_config=dsl.PipelineConfig(workspace=dsl.WorkspaceConfig(size="1Gi")))
def shares_workspace(fail: bool = False) -> str:
    left = leaves(folder=dsl.WORKSPACE_PATH_PLACEHOLDER, fail=fail)
    return picks_up().after(left).outputs["text"]


@dsl.pipeline
def containers(text: str = "a b") -> str:
    greets(name="you")
    greets()
    return shell(text=text).outputs["out"]


@dsl.pipeline
def moved(folder: str):
    made = elsewhere(folder=folder)
    read_moved(data=made.outputs["data"])


@dsl.pipeline
def promising() -> str:
    return silent().outputs["out"]


@component
def not_a_number(metrics: dsl.Output[dsl.Metrics]) -> float:
    metrics.log_metric("loss", float("nan"))
    return float("nan")


@component
def is_nan(x: float, metrics: dsl.Input[dsl.Metrics]) -> bool:
    return x != x and metrics.metadata["loss"] != metrics.metadata["loss"]


@dsl.pipeline
def nan() -> bool:
    made = not_a_number()
    with dsl.If(made.outputs["Output"] >= 0.5):
        kill_itself()
    with dsl.If(made.outputs["Output"] < 0.5):
        kill_itself()
    return is_nan(x=made.outputs["Output"], metrics=made.outputs["metrics"]).output


@dsl.pipeline
def undecidable(folder: str, word: Optional[str] = None):
    count(folder=folder, name="first")
    with dsl.If(word == "go"):
        count(folder=folder, name="inside")


@dsl.pipeline
def accelerated():
    task = kill_itself().set_cpu_limit("4").set_memory_limit("16G")
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(2)


@dsl.pipeline
def branching(folder: str, go: bool = True) -> NamedTuple("Out", [("value", int)]):
    first = count(folder=folder, name="first", value=2)
    with dsl.If(go == True):  # noqa: E712
        inside = count(folder=folder, name="inside", value=first.output)
    with dsl.Else():
        other = count(folder=folder, name="other", value=first.output)
    chosen = dsl.OneOf(inside.output, other.output)
    last = count(folder=folder, name="last", value=chosen)
    return NamedTuple("Out", [("value", int)])(last.output)


@component
def note(folder: str, status: dsl.PipelineTaskFinalStatus):
    import os

    with open(os.path.join(folder, "status"), "w") as file:
        file.write(f"{status.state} {status.pipeline_task_name} {status.error_message}")


@component
def fail_if(text: str, bad: str) -> str:
    if text == bad:
        raise ValueError(f"{text} is bad")
    return text


@dsl.pipeline
def watched(folder: str, text: str = "good"):
    """An exit task after two steps, the first of which fails if `text` is bad."""
    end = note(folder=folder)
    with dsl.ExitHandler(end):
        first = fail_if(text=text, bad="bad")
        count(folder=folder, name="second").after(first)


@dsl.pipeline
def cleaned_up(folder: str, text: str = "good"):
    """An exit task that asks nothing of how it went."""
    end = count(folder=folder, name="cleaned")
    with dsl.ExitHandler(end):
        first = fail_if(text=text, bad="bad")
        count(folder=folder, name="second").after(first)


@dsl.pipeline
def tolerant(folder: str, text: str = "bad"):
    """`count` runs although what it follows failed, and so does what follows `count`."""
    first = fail_if(text=text, bad="bad").set_caching_options(False)
    after = count(folder=folder, name="after", value=1).after(first).ignore_upstream_failure()
    after.set_caching_options(False)
    count(folder=folder, name="later", value=after.output)
    count(folder=folder, name="not").after(first)


@dsl.pipeline
def one_turn_fails(folder: str):
    end = note(folder=folder)
    with dsl.ExitHandler(end):
        with dsl.ParallelFor(["good", "bad", "late"], parallelism=1) as item:
            said = fail_if(text=item, bad="bad")
            count(folder=folder, name=said.output)


@dsl.pipeline
def wants_a_volume(folder: str):
    task = count(folder=folder, name="x")
    kubernetes.mount_pvc(task, pvc_name="data", mount_path="/data")
    kubernetes.use_secret_as_env(task, "login", {"token": "TOKEN"})
    kubernetes.use_secret_as_volume(task, "login", "/secrets")


@dsl.pipeline
def knows_a_secret(folder: str):
    task = count(folder=folder, name="x")
    kubernetes.use_secret_as_env(task, "login", {"token": "TOKEN"})


@dsl.pipeline
def tells_a_secret() -> str:
    task = reads_environment(name="HF_TOKEN")
    kubernetes.use_secret_as_env(task, "hub", {"token": "HF_TOKEN"})
    return task.output


@component
def gather(folder: str, model: dsl.Output[dsl.Model], bad_node: int = -1) -> str:
    """Every node tells node rank 0 its number over the network; no torch."""
    import os
    import socket
    from pathlib import Path

    from rekindle.launch.rendezvous import Rendezvous

    place = Rendezvous.current()
    with open(os.path.join(folder, f"node-{place.node_rank}"), "a") as file:
        file.write(model.path)
    if place.node_rank == bad_node:
        while len(list(Path(folder).glob("node-*"))) < place.nodes:
            pass  # a container that only just starts does not hear a signal
        raise ValueError(f"node {place.node_rank} is bad")
    if place.node_rank:
        while True:
            try:
                with socket.create_connection((place.address, place.port)) as line:
                    line.sendall(b"%d" % place.node_rank)
                return "not node 0"
            except ConnectionRefusedError:
                pass
    found = []
    with socket.create_server((place.address, place.port)) as server:
        while len(found) < place.nodes - 1:
            line, _ = server.accept()
            with line:
                found.append(int(line.recv(9)))
    with open(model.path, "w") as file:
        file.write(f"made by {place.nodes} nodes")
    return f"{place.nodes} nodes, heard of {sorted(found)}"


@component
def sum_of_ranks(folder: str, model: dsl.Output[dsl.Model]) -> float:
    """torchrun's ranks, one a node, add up their numbers."""
    import os
    import textwrap
    from pathlib import Path

    from rekindle.launch.rendezvous import Rendezvous
    from rekindle.launch.torchrun import torchrun
    from rekindle.spec.model import TrainSpec

    place = Rendezvous.current()
    script = Path(folder, f"script-{place.node_rank}.py")
    script.write_text(
        textwrap.dedent(f"""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        one = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(one)
        if dist.get_rank() == 0:
            open({str(Path(folder) / "sum")!r}, "w").write(str(one.item()))
        dist.destroy_process_group()
        """)
    )
    status = Path(folder, f"status-{place.node_rank}")
    status.mkdir()
    torchrun([str(script)], TrainSpec(entrypoint=str(script)), status=status)
    if place.node_rank:
        return 0.0
    Path(model.path).write_text("trained")
    return float(Path(folder, "sum").read_text())


@component
def measure(model: dsl.Input[dsl.Model]) -> str:
    with open(model.path) as file:
        return file.read()


@dsl.pipeline
def gathered(folder: str, bad_node: int = -1) -> str:
    task = gather(folder=folder, bad_node=bad_node)
    rekindle.distribute(task, nodes=3)
    read = measure(model=task.outputs["model"])
    return read.output


@dsl.pipeline
def summed(folder: str) -> float:
    return rekindle.distribute(sum_of_ranks(folder=folder), nodes=2).outputs["Output"]


@dsl.pipeline
def waits_for_ever(folder: str):
    rekindle.distribute(hang(folder=folder), nodes=1, machine="big", max_run_hours=0.001)


@component
def count_to(ten: int, save_to: str, model: dsl.Output[dsl.Model]) -> bool:
    """Counts on two nodes, saves each number, and says with 75 that it was told to stop."""
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    from rekindle.launch.rendezvous import Rendezvous

    place = Rendezvous.current()
    saved = Path(save_to, f"saved-{place.node_rank}")
    first = int(saved.read_text()) if saved.exists() else 0
    with Path(save_to, f"starts-{place.node_rank}").open("a") as file:
        file.write(f"{first}\n")
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    for number in range(first + 1, ten + 1):
        saved.write_text(str(number))
        while number == ten // 2 and first == 0 and not told:
            time.sleep(0.01)  # as a long step would
        if told:
            sys.exit(75)
    Path(model.path).write_text(os.environ.get("HF_TOKEN", "no token"))  # node rank 0's counts
    model.metadata["counted"] = ten
    return True


@component
def keep(model: dsl.Input[dsl.Model]) -> str:
    from pathlib import Path

    return f"{Path(model.path).read_text()}, {model.metadata['counted']}"


@dsl.pipeline
def taken_away(save_to: str, ten: int = 10):
    counted = rekindle.distribute(
        count_to(ten=ten, save_to=save_to), nodes=2, spot=True, checkpoint="save_to"
    )
    with dsl.If(counted.outputs["Output"] == True, name="gate"):
        keep(model=counted.outputs["model"])


@component
def keep_count(ten: int, model: dsl.Output[dsl.Model]):
    with open(model.path, "w") as file:
        file.write("on a GPU")
    model.metadata["counted"] = ten


@dsl.pipeline
def on_a_gpu(ten: int = 1):
    task = keep_count(ten=ten).set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)
    keep(model=task.outputs["model"])


@component
def odd_text(folder: str) -> str:
    """Prints and returns what UTF-8 has no bytes for."""
    import os
    import sys

    with open(os.path.join(folder, "odd"), "a") as file:
        file.write("x")
    sys.stdout.buffer.write(b"\xff\xfe\n")
    print("\ud800 \u4e2d")
    return "a \ud800 b"


@component
def is_odd(text: str) -> bool:
    return text == "a \ud800 b"


@dsl.pipeline
def odd(folder: str):
    is_odd(text=odd_text(folder=folder).output)


@component
def tangle(data: dsl.Output[dsl.Dataset]):
    """Leaves a link to itself, and a name that is not UTF-8."""
    import os

    os.makedirs(data.path)
    os.symlink("loop", os.path.join(data.path, "loop"))
    with open(os.path.join(os.fsencode(data.path), b"\xff"), "w") as file:
        file.write("x")


@dsl.pipeline
def tangled():
    tangle()


@component
def place(home: str, settings: str, folder: str, out: dsl.Output[dsl.Artifact]) -> str:
    """Names places in the home, as the shipped pipeline does."""
    import os

    with open(os.path.join(folder, "place"), "a") as file:
        file.write("x")
    with open(out.path, "w") as file:
        file.write("x")
    out.metadata["beside"] = f"file://{home}/beside"
    return os.path.join(home, "state")


@dsl.pipeline
def placed(home: str, settings: str, folder: str):
    place(home=home, settings=settings, folder=folder)
