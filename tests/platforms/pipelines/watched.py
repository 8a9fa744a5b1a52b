"""A pipeline that fails until a file is there, and then goes on until another one is gone."""

from kfp import dsl


@dsl.component(base_image="python:3.11")
def count(flag: str, model: dsl.Output[dsl.Model]) -> int:
    from pathlib import Path

    print("counting")
    Path(model.path).write_text("seven")
    model.metadata["record"] = "none of ours"
    if not Path(flag).exists():
        raise ValueError("there is no flag")
    return 7


@dsl.component(base_image="python:3.11")
def tell(n: int, stay: str):
    import time
    from pathlib import Path

    for i in range(n):
        print("line", i, flush=True)
    while Path(stay).exists():
        time.sleep(0.05)


@dsl.component(base_image="python:3.11")
def never():
    raise AssertionError


@dsl.pipeline(name="watched")
def watched(flag: str, stay: str):
    counted = count(flag=flag)
    tell(n=counted.outputs["Output"], stay=stay).set_caching_options(False)
    with dsl.If(counted.outputs["Output"] == 8):
        never()
