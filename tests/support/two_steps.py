"""A pipeline of two steps that tests of every platform compile, and variants of its first step."""

from typing import Any

from kfp import dsl

import rekindle

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def make(n: int, text: str, data: dsl.Output[dsl.Dataset]) -> bool:
    return n > 1


@component
def use(data: dsl.Input[dsl.Dataset], flag: bool):
    print(flag)


@dsl.pipeline(name="two-steps")
def pipeline(n: int, text: str = "a"):
    first = make(n=n, text=text).set_retry(2, backoff_duration="7s").set_cpu_limit("4")
    with dsl.If(first.outputs["Output"] == True):  # noqa: E712
        use(data=first.outputs["data"], flag=first.outputs["Output"])


def changed(**change: Any) -> Any:
    """The two steps with something about them changed."""

    @dsl.pipeline(name=change.pop("name", "changed"))
    def other() -> None:
        task = make(n=1, text="")
        for method, values in change.items():
            getattr(task, method)(*values)

    return other


def spread(nodes: int, retry: bool = False, **more: Any) -> Any:
    """One step on several nodes."""

    @dsl.pipeline(name="spread")
    def other() -> None:
        task = rekindle.distribute(make(n=1, text=""), nodes=nodes, **more)
        if retry:
            task.set_retry(2)

    return other
