# ruff: noqa
"""A pipeline of quick steps whose outputs depend on every byte of their inputs."""

from kfp import dsl

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def make(seed: int, name: str, data: dsl.Output[dsl.Dataset]):
    import hashlib
    import os
    import time

    os.makedirs(os.path.join(data.path, "deep"))
    for path in ("a", "b", "deep/c", "deep/d"):
        block = hashlib.sha512(f"{seed} {name} {path}".encode()).digest()
        with open(os.path.join(data.path, path), "wb") as file:
            for _ in range(4):
                file.write(block * 64)
                time.sleep(0.01)


@component
def mix(
    left: dsl.Input[dsl.Dataset], right: dsl.Input[dsl.Dataset], data: dsl.Output[dsl.Dataset]
) -> str:
    import hashlib
    import os
    import time

    running = hashlib.sha512()
    os.makedirs(data.path)
    for place in (left.path, right.path):
        for folder, _, names in sorted(os.walk(place)):
            for name in sorted(names):
                with open(os.path.join(folder, name), "rb") as file:
                    running.update(file.read())
                with open(os.path.join(data.path, f"{running.hexdigest()[:8]}"), "wb") as file:
                    file.write(running.digest() * 50)
                time.sleep(0.01)
    return running.hexdigest()


@component
def join(left: str, right: str) -> str:
    return left + right


@dsl.pipeline
def chain(seed: int):
    first, second = make(seed=seed, name="first"), make(seed=seed, name="second")
    mixed = mix(left=first.outputs["data"], right=second.outputs["data"])
    again = mix(left=mixed.outputs["data"], right=first.outputs["data"])
    join(left=mixed.outputs["Output"], right=again.outputs["Output"])
