# ruff: noqa
"""Pipelines whose values come as other kinds than their inputs have: those of `recorded_values.json` in
tests/conformance, which says what a real KFP gave for each."""

# Components are written as users of KFP write them, hence the noqa.

from typing import Dict, List, NamedTuple

from kfp import dsl

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def texts(i: str, f: str, w: str, b: str, s: str, l: str, d: str, e: str, big: str) -> str:
    import json

    values = (i, f, w, b, s, l, d, e, big)
    return json.dumps([[type(v).__name__, v] for v in values], ensure_ascii=False)


@component
def kinds(i: int, w: int, f: float, g: float, b: bool, l: list, d: dict) -> str:
    import json

    values = (i, w, f, g, b, l, d)
    return json.dumps([[type(v).__name__, repr(v)] for v in values], ensure_ascii=False)


@component
def as_int(v: int) -> str:
    return f"{type(v).__name__} {v!r}"


@component
def as_float(v: float) -> str:
    return f"{type(v).__name__} {v!r}"


@component
def as_bool(v: bool) -> str:
    return f"{type(v).__name__} {v!r}"


@component
def as_list(v: list) -> str:
    return f"{type(v).__name__} {v!r}"


@component
def as_dict(v: dict) -> str:
    return f"{type(v).__name__} {v!r}"


@component
def as_str(v: str) -> str:
    return f"{type(v).__name__} {v!r}"


ROW = {
    "i": 1,
    "f": 1.5,
    "w": 2.0,
    "b": True,
    "s": "x",
    "l": [1, "é", 2.5],
    "d": {"k": "ü", "n": 1},
    "e": 1e-05,
    "big": 1e21,
}


@component
def gen_rows() -> list:
    return [
        {
            "i": 1,
            "f": 1.5,
            "w": 2.0,
            "b": True,
            "s": "x",
            "l": [1, "é", 2.5],
            "d": {"k": "ü", "n": 1, "a": None},
            "e": 1e-05,
            "big": 1e21,
        }
    ]


@dsl.pipeline
def fields_into_texts(rows: list = [ROW]):
    with dsl.ParallelFor(rows) as r:
        texts(i=r.i, f=r.f, w=r.w, b=r.b, s=r.s, l=r.l, d=r.d, e=r.e, big=r.big)


@dsl.pipeline
def fields_of_a_step_into_kinds():
    with dsl.ParallelFor(gen_rows().output) as r:
        kinds(i=r.i, w=r.w, f=r.f, g=r.i, b=r.b, l=r.l, d=r.d)


@dsl.pipeline
def wrong_kinds(
    a: list = [{"v": "7"}],
    b: list = [{"v": "false"}],
    c: list = [{"v": 0}],
    d: list = [{"v": 1.5}],
    e: list = [{"v": "[1]"}],
    f: list = [{"v": '{"a": 1}'}],
    g: list = [{"v": True}],
):
    """Each alone in a loop of its own, all of them side by side."""
    with dsl.ParallelFor(a) as r:
        as_int(v=r.v)
    with dsl.ParallelFor(b) as r:
        as_bool(v=r.v)
    with dsl.ParallelFor(c) as r:
        as_bool(v=r.v)
    with dsl.ParallelFor(d) as r:
        as_int(v=r.v)
    with dsl.ParallelFor(e) as r:
        as_list(v=r.v)
    with dsl.ParallelFor(f) as r:
        as_dict(v=r.v)
    with dsl.ParallelFor(g) as r:
        as_int(v=r.v)


@component
def gen_items() -> list:
    return [1, "two", None, 2.5, True, ["é"], "null", ""]


@dsl.pipeline
def items_of_many_kinds():
    with dsl.ParallelFor(gen_items().output) as r:
        as_str(v=r)


@dsl.pipeline
def conditions_on_fields(rows: list = [{"n": 2, "b": True, "f": 2.0, "s": "2"}]):
    with dsl.ParallelFor(rows) as r:
        with dsl.If(r.n == 2):
            as_str(v="n == 2")
        with dsl.If(r.b == True):
            as_str(v="b == True")
        with dsl.If(r.s == "2"):
            as_str(v="s == '2'")
        with dsl.If(r.n >= 2):
            as_str(v="n >= 2")


@component
def many() -> NamedTuple(
    "Out",
    [
        ("i", int),
        ("f", float),
        ("w", float),
        ("b", bool),
        ("s", str),
        ("l", List[int]),
        ("d", Dict[str, float]),
        ("t", str),
    ],
):
    return (7, 0.1, 3.0, False, "", [1, 2], {"a": 1.0}, "line\n\ttab \\ é 日本")


@component
def eat(
    i: int, f: float, w: float, b: bool, s: str, l: List[int], d: Dict[str, float], t: str
) -> str:
    import json

    values = (i, f, w, b, s, l, d, t)
    return json.dumps([[type(v).__name__, repr(v)] for v in values], ensure_ascii=False)


@dsl.pipeline
def outputs_handed_on(big: int = 9007199254740993):
    o = many().outputs
    eat(i=o["i"], f=o["f"], w=o["w"], b=o["b"], s=o["s"], l=o["l"], d=o["d"], t=o["t"])
    as_int(v=big)


@component
def big_out() -> NamedTuple("Out", [("a", int), ("z", float), ("n", float)]):
    return (9007199254740993, 1e300, -0.0)


@component
def eat2(a: int, z: float, n: float) -> str:
    return f"{a!r} {z!r} {n!r}"


@dsl.pipeline
def big_numbers():
    o = big_out().outputs
    eat2(a=o["a"], z=o["z"], n=o["n"])


@component
def as_any(v: float, w: int) -> str:
    return f"{type(v).__name__} {v!r} {type(w).__name__} {w!r}"


@dsl.pipeline
def numbers(v: float = 2.0, w: int = 3):
    as_any(v=v, w=w)
    as_any(v=1e-05, w=123456789012)


@dsl.pipeline
def numbers_in_texts(x: float = 2.0, n: int = 3, b: bool = True, s: str = "plain é"):
    as_str(v=f"{x}|{n}|{b}|{s}")


@component
def one(a: str) -> str:
    return a


@dsl.pipeline
def folders_named_by_numbers(x: float = 2.0, lr: float = 1e-05):
    one(a=f"gs://b/x={x}/lr={lr}")


@dsl.container_component
def given(name: str, n: float, b: bool, l: list, d: dict, out: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="busybox",
        command=[
            "sh",
            "-c",
            "o=$0; mkdir -p $(dirname $o); printf '%s|' \"$@\" > $o; printf '%s\\n' \"$@\"",
        ],
        args=[out, name, n, b, l, d, f"--l={l}"],
    )


@dsl.pipeline
def arguments_of_containers(n: float = 2.0, lr: float = 1e-05):
    g = given(name="é\"q'", n=n, b=True, l=[1, "é", 2.5], d={"k": "ü", "n": 1})
    as_str(v=g.outputs["out"])
    given(name="", n=lr, b=False, l=[], d={})


@component
def concat(a: str, b: str) -> str:
    return a + b


@component
def gen() -> list:
    return [{"a": i, "b": i * 10} for i in range(1, 3)]


@dsl.pipeline
def loop_parameter():
    """samples/core/loop_parameter of kubeflow/pipelines."""
    with dsl.ParallelFor(gen().output) as item:
        concat(a=item.a, b=item.b)


@component
def t(v: str) -> str:
    return v


@dsl.pipeline
def conditions_on_items(nums: list = [1, 2], rows: list = [{"n": 2, "s": "a", "b": True}]):
    with dsl.ParallelFor([1, 2]) as i:
        with dsl.If(i == 2):
            t(v="static")
    with dsl.ParallelFor(nums) as i:
        with dsl.If(i == 2):
            t(v="untyped")
    with dsl.ParallelFor(rows) as r:
        with dsl.If(r.s == "a"):
            t(v="key text")


@component
def deploy(dry_run: bool) -> str:
    return "dry" if dry_run else "DEPLOYED"


@dsl.pipeline
def flags(rows: list = [{"dry": "false"}, {"dry": 0}, {"dry": "true"}]):
    with dsl.ParallelFor(rows) as r:
        deploy(dry_run=r.dry)


@dsl.pipeline
def guarded_kinds(rows: list = [{"kind": "number", "v": 1}, {"kind": "text", "v": "x"}]):
    """Not recorded: a wrong kind in a branch that is not taken."""
    with dsl.ParallelFor(rows) as r:
        with dsl.If(r.kind == "number"):
            as_int(v=r.v)


# Of artifacts: what no KFP was recorded to give, since it takes no s3:// of another store


@component
def push(model: dsl.Output[dsl.Model]):
    model.uri = "projects/1/locations/eu/endpoints/2"


@component
def table() -> dsl.Dataset:
    return dsl.Dataset(name="d", uri="s3://warehouse/table", metadata={"rows": 5.0})


@component
def write_beside(text: str, model: dsl.Output[dsl.Model]):
    with open(model.path + ".txt", "w") as file:
        file.write(text)
    model.uri = model.uri + ".txt"


@component
def choose(first: dsl.Input[dsl.Model], best: dsl.Output[dsl.Model]):
    best.uri = first.uri
    best.metadata["chosen"] = True


@component
def train(text: str, model: dsl.Output[dsl.Model]):
    with open(model.path, "w") as file:
        file.write(text)
    with open(model.path + ".joblib", "w") as file:
        file.write(text.upper())


@component
def show(m: dsl.Input[dsl.Model], d: dsl.Input[dsl.Dataset]) -> str:
    return f"{m.uri} {d.uri} {d.metadata['rows']!r}"


@component
def look(m: dsl.Input[dsl.Model]) -> str:
    with open(m.path) as file:
        return file.read()


@component
def look_beside(m: dsl.Input[dsl.Model]) -> str:
    with open(m.path) as file, open(m.path + ".joblib") as other:
        return f"{file.read()} {other.read()} {m.metadata['chosen']}"


@dsl.pipeline
def uris():
    """A resource, a table elsewhere, a file beside the given place, and another step's model."""
    show(m=push().outputs["model"], d=table().output)
    look(m=write_beside(text="beside").outputs["model"])
    look_beside(m=choose(first=train(text="abc").outputs["model"]).outputs["best"])
