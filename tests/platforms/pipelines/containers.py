"""Pipelines with steps that docker can run; `tests/platforms/local/images.py` makes their image."""

from kfp import dsl, kubernetes

import rekindle

IMAGE = "rekindle-test/small:1"


def sh(script: str, *args, image: str = IMAGE) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(image=image, command=["sh", "-ec", script, "step"], args=list(args))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def numbers(data: dsl.Output[dsl.Dataset]):
    from pathlib import Path

    Path(data.path).mkdir()
    Path(data.path, "a, b.txt").write_text("1\n2\n3\n")


@dsl.container_component
def count(data: dsl.Input[dsl.Dataset], copy: dsl.Output[dsl.Dataset], lines: dsl.OutputPath(int)):
    return sh(
        'cat "$1/a, b.txt" > "$2"; grep -c . "$2" > "$3"; '
        'if touch "$1/more"; then exit 9; fi; ls / | grep -qx made-for-tests',
        data.path,
        copy.path,
        lines,
    )


@dsl.pipeline
def counted() -> int:
    return count(data=numbers().outputs["data"]).outputs["lines"]


@dsl.container_component
def look(file: str):
    return sh(
        'echo "user $(id -u)"; echo "home $HOME"; touch "$HOME/x"; echo "token $TOKEN"; '
        'echo "cluster $CLUSTER_TOKEN"; echo "mode $MODE"; echo "other $OTHER"; '
        'echo "path $PATH"; '
        'if [ -e "$1" ]; then echo "file seen"; else echo "file unseen"; fi; '
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null || true",
        file,
    )


@dsl.pipeline
def looking(file: str):
    step = look(file=file)
    step.set_env_variable("MODE", "a b=c")
    step.set_env_variable("PATH", "/bin:/usr/bin")
    step.set_memory_limit("64Mi").set_cpu_limit("512")
    kubernetes.use_secret_as_env(step, "s", {"key": "CLUSTER_TOKEN"})


@dsl.container_component
def leave(code: int):
    return sh('echo "leaving"; exit "$1"', code)


@dsl.pipeline
def leaving(code: int):
    leave(code=code).set_retry(num_retries=1, backoff_duration="0s")


@dsl.container_component
def wait_for_term(begun: dsl.Output[dsl.Artifact]):
    return sh(
        "trap 'echo saved; exit 75' TERM; echo begun > \"$1\"; while :; do sleep 0.1; done",
        begun.path,
    )


@dsl.pipeline
def waiting():
    wait_for_term()


@dsl.container_component
def sleep(begun: dsl.Output[dsl.Artifact]):
    return sh('echo begun > "$1"; exec sleep 600', begun.path)


@dsl.pipeline
def sleeping():
    sleep()


@dsl.container_component
def eat():
    return dsl.ContainerSpec(image=IMAGE, command=["python3", "-c", "bytearray(1 << 30)"])


@dsl.pipeline
def hungry():
    eat().set_memory_limit("64Mi")


@dsl.container_component
def ignore_term(begun: dsl.Output[dsl.Artifact]):
    return sh("trap '' TERM; echo begun > \"$1\"; while :; do sleep 0.1; done", begun.path)


@dsl.pipeline
def deaf():
    ignore_term()


@dsl.pipeline
def deaf_and_limited():
    kubernetes.set_timeout(ignore_term(), seconds=2)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def where_am_i(given: dsl.Input[dsl.Dataset], made: dsl.Output[dsl.Dataset]) -> str:
    from pathlib import Path

    Path(made.path).write_text(",".join(file.name for file in Path(given.path).iterdir()))
    made.metadata["seen"] = 1
    return "inside" if Path("/made-for-tests").exists() else "outside"


@dsl.pipeline
def python_inside() -> str:
    return where_am_i(given=numbers().outputs["data"]).outputs["Output"]


@dsl.component(base_image=IMAGE, packages_to_install=["no-such-package==1.2"])
def with_packages() -> str:
    return "ran"


@dsl.pipeline
def installing() -> str:
    return with_packages().output


@dsl.container_component
def meet(told: dsl.OutputPath(str)):
    script = """
import json, os, socket, sys
place = json.loads(os.environ["REKINDLE_RENDEZVOUS"])
assert json.loads(os.environ["CLUSTER_SPEC"])["task"]["index" if place["node_rank"] else "type"] in (0, "workerpool0")
there = (place["address"], place["port"])
if place["node_rank"] == 0:
    peer = socket.create_server(there).accept()[0]
    os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
    open(sys.argv[1], "w").write(peer.recv(100).decode())
else:
    while True:
        try:
            socket.create_connection(there).sendall(b"hello from node 1")
            break
        except ConnectionRefusedError:
            pass
"""
    return dsl.ContainerSpec(image=IMAGE, command=["python3", "-c", script], args=[told])


@dsl.pipeline
def met() -> str:
    step = meet()
    rekindle.distribute(step, nodes=2)
    return step.outputs["told"]


@dsl.container_component
def of_no_registry():
    return sh("true", image="localhost:1/no-such-image:1")


@dsl.pipeline
def unobtainable():
    of_no_registry()
