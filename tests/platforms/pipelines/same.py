# ruff: noqa
"""Small pipelines that run here and under kfp.local, with their arguments; both must give the same outputs."""

# Components are written as users of KFP write them, hence the noqa.

import os
from typing import Dict, List, NamedTuple, Optional

from kfp import dsl

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def greet(name: str) -> str:
    return f"hello, {name}"


@component
def add(a: int, b: int) -> int:
    return a + b


@component
def divide(a: float, b: float) -> float:
    return a / b


@component
def positive(x: float) -> bool:
    return x > 0


@component
def kinds(i: int, f: float, b: bool, s: str, items: List[str], table: Dict[str, str]) -> str:
    names = [type(v).__name__ for v in (i, b, s, items, table)]
    return " ".join(names) + f" {i} {float(f)} {b} {s!r} {items} {sorted(table.items())}"


@component
def split(text: str) -> NamedTuple("Out", [("first", str), ("count", int), ("share", float)]):
    words = text.split()
    return (words[0], len(words), 1 / len(words))


@component
def write(text: str, data: dsl.Output[dsl.Dataset]):
    with open(data.path, "w") as file:
        file.write(text)
    data.metadata["length"] = len(text)
    data.metadata["tags"] = {"source": "test"}


@component
def train(data: dsl.Input[dsl.Dataset], rounds: int, model: dsl.Output[dsl.Model]) -> float:
    import os

    os.makedirs(model.path)
    with open(data.path) as file, open(os.path.join(model.path, "weights.txt"), "w") as out:
        out.write(file.read() * rounds)
    model.metadata["trained_on"] = data.metadata["length"]
    model.metadata["framework"] = "none"
    return 0.5 * rounds


@component
def read(data: dsl.Input[dsl.Artifact]) -> str:
    import os

    path = data.path
    if os.path.isdir(path):
        path = os.path.join(path, sorted(os.listdir(path))[0])
    with open(path) as file:
        return f"{type(data).__name__}:{file.read()}:{sorted(data.metadata)}"


@component
def measure(metrics: dsl.Output[dsl.Metrics], page: dsl.Output[dsl.Markdown]):
    metrics.log_metric("accuracy", 0.75)
    with open(page.path, "w") as file:
        file.write("# done")


@component
def read_metric(metrics: dsl.Input[dsl.Metrics]) -> float:
    return metrics.metadata["accuracy"]


@component
def paths(
    text: str, upper: dsl.OutputPath(str), size: dsl.OutputPath(int), flag: dsl.OutputPath(bool)
):
    for path, value in ((upper, text.upper()), (size, str(len(text))), (flag, "True")):
        with open(path, "w") as file:
            file.write(value)


@component
def from_path(data: dsl.InputPath("Dataset")) -> str:
    with open(data) as file:
        return file.read()[::-1]


@component
def defaults(a: int = 3, b: str = "bee", c: Optional[str] = None, d: float = 0.5) -> str:
    return f"{a} {b} {c} {d}"


@component
def variable(name: str) -> str:
    import os

    return os.environ.get(name, "not set")


@component
def fail_until(folder: str, times: int) -> int:
    import os

    with open(os.path.join(folder, "tries"), "a") as file:
        file.write("x")
    tries = os.path.getsize(os.path.join(folder, "tries"))
    if tries < times:
        raise RuntimeError("not yet")
    return tries


@component
def returns_artifact(text: str) -> dsl.Dataset:
    made = dsl.Dataset(uri=dsl.get_uri("Output"), metadata={"kind": "returned"})
    with open(made.path, "w") as file:
        file.write(text)
    return made


@component
def nothing(note: str):
    print(note)


@dsl.pipeline
def one_step(name: str = "world") -> str:
    return greet(name=name).output


@dsl.pipeline
def arithmetic(a: int, b: int = 4) -> float:
    total = add(a=a, b=b)
    again = add(a=total.output, b=1)
    return divide(a=0.5, b=2.0).after(again).output


@dsl.pipeline
def integers(a: int = 2) -> int:
    return add(a=add(a=a, b=3).output, b=add(a=a, b=a).output).output


@dsl.pipeline
def all_kinds(
    i: int = 7,
    f: float = 2.5,
    b: bool = False,
    s: str = 'it\'s "q" {{x}} $PATH \\n',
    items: List[str] = ["x", "y"],
    table: Dict[str, str] = {"k": "v"},
) -> str:
    return kinds(i=i, f=f, b=b, s=s, items=items, table=table).output


@dsl.pipeline
def constants() -> str:
    return kinds(
        i=1, f=2.25, b=True, s="Grüße\n日本", items=["a"], table={"k": "v", "l": "w"}
    ).output


@dsl.pipeline
def named_tuple(text: str = "one two three four") -> NamedTuple(
    "Out", [("first", str), ("count", int), ("share", float)]
):
    parts = split(text=text)
    out = NamedTuple("Out", [("first", str), ("count", int), ("share", float)])
    return out(parts.outputs["first"], parts.outputs["count"], parts.outputs["share"])


@dsl.pipeline
def artifacts(text: str = "abc", rounds: int = 2) -> NamedTuple(
    "Out", [("loss", float), ("seen", str), ("data", dsl.Dataset), ("model", dsl.Model)]
):
    made = write(text=text)
    fitted = train(data=made.outputs["data"], rounds=rounds)
    seen = read(data=fitted.outputs["model"])
    out = NamedTuple(
        "Out", [("loss", float), ("seen", str), ("data", dsl.Dataset), ("model", dsl.Model)]
    )
    return out(fitted.outputs["Output"], seen.output, made.outputs["data"], fitted.outputs["model"])


@dsl.pipeline
def metrics() -> NamedTuple(
    "Out", [("value", float), ("metrics", dsl.Metrics), ("page", dsl.Markdown)]
):
    measured = measure()
    value = read_metric(metrics=measured.outputs["metrics"])
    out = NamedTuple("Out", [("value", float), ("metrics", dsl.Metrics), ("page", dsl.Markdown)])
    return out(value.output, measured.outputs["metrics"], measured.outputs["page"])


@dsl.pipeline
def output_paths(text: str = "abcd") -> NamedTuple(
    "Out", [("upper", str), ("size", int), ("flag", bool)]
):
    made = paths(text=text)
    out = NamedTuple("Out", [("upper", str), ("size", int), ("flag", bool)])
    return out(made.outputs["upper"], made.outputs["size"], made.outputs["flag"])


@dsl.pipeline
def input_path(text: str = "abcd") -> str:
    return from_path(data=write(text=text).outputs["data"]).output


@dsl.pipeline
def default_arguments(a: int = 9) -> NamedTuple("Out", [("x", str), ("y", str)]):
    out = NamedTuple("Out", [("x", str), ("y", str)])
    return out(defaults().output, defaults(a=a, c="see", d=1.25).output)


@dsl.pipeline
def optional_parameter(c: Optional[str] = None) -> str:
    return defaults(c=c).output


@dsl.pipeline
def branch_on_number(a: int = 3) -> str:
    total = add(a=a, b=1)
    with dsl.If(total.output > 3):
        big = greet(name="big")
    with dsl.Elif(total.output == 3):
        three = greet(name="three")
    with dsl.Else():
        small = greet(name="small")
    return greet(name=dsl.OneOf(big.output, three.output, small.output)).output


@dsl.pipeline
def branch_on_bool(x: float = 1.5) -> str:
    sign = positive(x=x)
    with dsl.If(sign.output == True):  # noqa: E712
        up = greet(name="up")
    with dsl.Else():
        down = greet(name="down")
    return dsl.OneOf(up.output, down.output)


@dsl.pipeline
def branch_on_text(word: str = "go") -> str:
    said = greet(name=word)
    with dsl.If(said.output == "hello, go"):
        with dsl.If(word != "stop"):
            nothing(note="went")
    with dsl.If(word < "m"):
        nothing(note="early in the alphabet")
    return said.output


@dsl.pipeline
def branch_on_share(text: str = "a b") -> int:
    parts = split(text=text)
    with dsl.If(parts.outputs["share"] >= 0.5):
        nothing(note="few")
    with dsl.If(parts.outputs["count"] != 2):
        nothing(note="not two")
    return parts.outputs["count"]


@dsl.pipeline
def inner(a: int, text: str = "inner") -> NamedTuple(
    "Out", [("total", int), ("data", dsl.Dataset)]
):
    out = NamedTuple("Out", [("total", int), ("data", dsl.Dataset)])
    return out(add(a=a, b=10).output, write(text=text).outputs["data"])


@dsl.pipeline
def nested(a: int = 1) -> NamedTuple("Out", [("total", int), ("seen", str)]):
    first = inner(a=a)
    second = inner(a=first.outputs["total"], text="second")
    seen = read(data=second.outputs["data"])
    out = NamedTuple("Out", [("total", int), ("seen", str)])
    return out(second.outputs["total"], seen.output)


@dsl.pipeline
def chooser(x: float) -> str:
    with dsl.If(positive(x=x).output == True):  # noqa: E712
        up = greet(name="plus")
    with dsl.Else():
        down = greet(name="minus")
    return dsl.OneOf(up.output, down.output)


@dsl.pipeline
def nested_branches(x: float = -2.0) -> str:
    return greet(name=chooser(x=x).output).output


@dsl.pipeline
def formatted(name: str = "Ada", a: int = 2) -> str:
    total = add(a=a, b=a)
    return greet(name=f"{name} <{total.output}> {{{name}}}").output


@dsl.pipeline
def environment() -> str:
    return variable(name="REKINDLE_TEST").set_env_variable("REKINDLE_TEST", "a b'c\"d").output


@dsl.pipeline
def retried(folder: str) -> int:
    task = fail_until(folder=folder, times=3)
    task.set_retry(3, backoff_duration="0s", backoff_factor=1)
    return task.output


@dsl.pipeline
def ordered(folder: str) -> int:
    first = fail_until(folder=folder, times=1)
    second = fail_until(folder=folder, times=1).after(first)
    third = fail_until(folder=folder, times=1).after(first, second)
    for task in (first, second, third):
        task.set_caching_options(False)
    return third.output


@dsl.pipeline
def artifact_returned(text: str = "made") -> NamedTuple(
    "Out", [("seen", str), ("data", dsl.Dataset)]
):
    made = returns_artifact(text=text)
    out = NamedTuple("Out", [("seen", str), ("data", dsl.Dataset)])
    return out(read(data=made.output).output, made.output)


@dsl.pipeline
def long_text(name: str) -> str:
    return greet(name=name).output


@component
def total(items: List[int], table: Dict[str, int]) -> str:
    return repr(sum(items)) + repr(table)


@component
def numbers(count: int) -> List[int]:
    return list(range(count))


@dsl.pipeline
def whole_numbers_in_lists(items: List[int] = [1, 2], count: int = 3) -> NamedTuple(
    "Out", [("given", str), ("made", str)]
):
    out = NamedTuple("Out", [("given", str), ("made", str)])
    made = numbers(count=count)
    return out(total(items=items, table={"a": 1}).output, total(items=made.output, table={}).output)


@component
def echo(text: str) -> str:
    return text


@dsl.pipeline
def gate_on_text(text: str) -> str:
    said = echo(text=text)
    with dsl.If(said.output == "deploy"):
        yes = greet(name="DEPLOYED")
    with dsl.Else():
        no = greet(name="refused")
    return dsl.OneOf(yes.output, no.output)


@dsl.pipeline
def one_of_artifacts(x: float = -1.0) -> str:
    with dsl.If(positive(x=x).output == True):  # noqa: E712
        up = write(text="up")
    with dsl.Else():
        down = write(text="down")
    return read(data=dsl.OneOf(up.outputs["data"], down.outputs["data"])).output


@dsl.pipeline
def inner_optional(c: Optional[str] = None) -> str:
    return defaults(c=c).output


@dsl.pipeline
def optional_into_nested(c: Optional[str] = None) -> str:
    return inner_optional(c=c).output


@component
def joined(items: List[str]) -> str:
    return " | ".join(items)


@component
def pair(a: str, b: str) -> str:
    return f"{a}-{b}"


@component
def words(text: str) -> List[str]:
    return text.split()


@component
def tables(text: str) -> List[Dict[str, str]]:
    return [{"who": word, "end": "!"} for word in text.split()]


@component
def several(data: dsl.Input[List[dsl.Dataset]]) -> str:
    found = []
    for one in data:
        with open(one.path) as file:
            found.append(f"{file.read()}:{int(one.metadata['length'])}")
    return " ".join(found)


@component
def is_long(text: str) -> bool:
    return len(text) > 1


@dsl.pipeline
def loop_over_constants() -> List[str]:
    with dsl.ParallelFor(["a", "b", "c"]) as item:
        said = greet(name=item)
    return dsl.Collected(said.output)


@dsl.pipeline
def loop_over_structs() -> str:
    with dsl.ParallelFor([{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]) as item:
        said = pair(a=item.a, b=item.b)
    return joined(items=dsl.Collected(said.output)).output


@dsl.pipeline
def loop_over_an_output(text: str = "one two three") -> str:
    with dsl.ParallelFor(words(text=text).output, parallelism=1) as item:
        said = greet(name=item)
        again = greet(name=said.output)
    return joined(items=dsl.Collected(again.output)).output


@dsl.pipeline
def loop_over_made_structs(text: str = "one two") -> str:
    with dsl.ParallelFor(tables(text=text).output) as item:
        said = pair(a=item.who, b=item.end)
    return joined(items=dsl.Collected(said.output)).output


@dsl.pipeline
def loop_over_an_argument(items: List[str] = ["p", "q"]) -> str:
    with dsl.ParallelFor(items) as item:
        said = greet(name=item)
    return joined(items=dsl.Collected(said.output)).output


@dsl.pipeline
def each(items: List[str]) -> str:
    with dsl.ParallelFor(items) as item:
        said = greet(name=item)
    return joined(items=dsl.Collected(said.output)).output


@dsl.pipeline
def loops_over_what_was_given(items: List[str] = ["p", "q"], times: int = 2) -> str:
    said = each(items=items).output
    joined(items=items).set_display_name("listed")
    add(a=times, b=1)
    with dsl.ParallelFor([{"names": ["a", "b"]}, {"names": ["c"]}]) as item:
        with dsl.ParallelFor(item.names) as name:
            greet(name=name)
    return pair(a=said, b=said).output


@dsl.pipeline
def letters(people: List[Dict[str, str]] = [{"who": "a", "end": "b"}], word: str = "dear") -> str:
    first = greet(name=word)
    with dsl.ParallelFor(people, parallelism=2) as person:
        said = pair(a=first.output, b=person.who)
        write(text=person.end)
    last = greet(name=word)
    last.after(said)
    return last.output


@dsl.pipeline
def limited_loop() -> str:
    with dsl.ParallelFor(["a", "b", "c"], parallelism=2) as item:
        said = greet(name=item)
        again = greet(name=said.output)
        greet(name=said.output)
    return joined(items=dsl.Collected(again.output)).output


@dsl.pipeline
def loop_with_a_branch(text: str = "a bb c dd") -> NamedTuple("Out", [("taken", str)]):
    out = NamedTuple("Out", [("taken", str)])
    with dsl.ParallelFor(words(text=text).output) as item:
        with dsl.If(is_long(text=item).output == True):  # noqa: E712
            said = greet(name=item)
        with dsl.Else():
            short = greet(name="short")
        one = echo(text=dsl.OneOf(said.output, short.output))
    return out(joined(items=dsl.Collected(one.output)).output)


@component
def named(result_0: str, rekindle_result: dsl.Output[dsl.Dataset], result: dsl.Output[dsl.Dataset]):
    for artifact in (rekindle_result, result):
        with open(artifact.path, "w") as file:
            file.write(f"{artifact.name} {result_0}")


@dsl.pipeline
def names(result_0: str = "p", artifact_0: str = "q", inputs: str = "i") -> str:
    """Artifacts and arguments with names that rekindle gives its own files and inputs."""
    made = named(result_0=f"{result_0}{inputs}")
    first = read(data=made.outputs["rekindle_result"])
    second = read(data=made.outputs["result"])
    return echo(text=f"{first.output} {second.output} {artifact_0} {result_0}").output


@dsl.pipeline
def gate(word: str) -> str:
    with dsl.If(word == "hello, go!"):
        yes = greet(name="yes")
    with dsl.Else():
        no = greet(name="no")
    return dsl.OneOf(yes.output, no.output)


@dsl.pipeline
def branch_on_formatted_text(word: str = "go") -> str:
    """A condition on text that is put together, and one on what a OneOf gave."""
    first = gate(word=f"{greet(name=word).output}!")
    second = gate(word=f"{first.output}")
    return echo(text=f"{first.output} {second.output}").output


@dsl.pipeline
def loop_in_a_branch(x: float = 1.0) -> str:
    with dsl.If(positive(x=x).output == True):  # noqa: E712
        with dsl.ParallelFor(["a", "b"]) as item:
            said = greet(name=item)
        yes = joined(items=dsl.Collected(said.output))
    with dsl.Else():
        no = greet(name="nobody")
    return dsl.OneOf(yes.output, no.output)


@dsl.pipeline
def loop_of_artifacts() -> str:
    with dsl.ParallelFor(["aa", "b", "cccc"]) as item:
        made = write(text=item)
    return several(data=dsl.Collected(made.outputs["data"])).output


@dsl.pipeline
def pairs_of(first: str) -> List[str]:
    with dsl.ParallelFor(["1", "2"]) as number:
        said = pair(a=first, b=number)
    return dsl.Collected(said.output)


@dsl.pipeline
def loop_over_nested_pipelines() -> str:
    with dsl.ParallelFor(["x", "y"]) as item:
        found = pairs_of(first=item)
        one = joined(items=found.output)
    return joined(items=dsl.Collected(one.output)).output


@dsl.pipeline
def nested_loops() -> str:
    with dsl.ParallelFor(["a", "b"]) as outer:
        with dsl.ParallelFor(["1", "2"]) as inner:
            said = pair(a=outer, b=inner)
        one = joined(items=dsl.Collected(said.output))
    return joined(items=dsl.Collected(one.output)).output


@dsl.pipeline
def imported(uri: str) -> str:
    brought = dsl.importer(
        artifact_uri=uri, artifact_class=dsl.Dataset, reimport=False, metadata={"kind": "text"}
    )
    return read(data=brought.output).output


SMALL_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "small.txt")

# name of the case: (pipeline, arguments); "FOLDER" becomes a fresh empty folder
CASES = {
    "one step": (one_step, {}),
    "names that are ours elsewhere": (names, {}),
    "one step, argument given": (one_step, {"name": 'it\'s \\"me\\" $HOME {{x}}'}),
    "arithmetic": (arithmetic, {"a": 3}),
    "integers": (integers, {"a": -5}),
    "all kinds of parameters": (all_kinds, {}),
    "all kinds of arguments": (
        all_kinds,
        {"i": 0, "f": 1e-7, "b": True, "s": "", "items": [], "table": {}},
    ),
    "constants": (constants, {}),
    "named tuple": (named_tuple, {}),
    "artifacts and metadata": (artifacts, {"rounds": 3}),
    "metrics": (metrics, {}),
    "output paths": (output_paths, {}),
    "input path": (input_path, {}),
    "defaults": (default_arguments, {}),
    "optional parameter, given": (optional_parameter, {"c": "given"}),
    "branch on a number: if": (branch_on_number, {}),
    "branch on a number: elif": (branch_on_number, {"a": 2}),
    "branch on a number: else": (branch_on_number, {"a": -7}),
    "branch on a bool: if": (branch_on_bool, {}),
    "branch on a bool: else": (branch_on_bool, {"x": -1.0}),
    "branch on text": (branch_on_text, {}),
    "branch on text, not taken": (branch_on_text, {"word": "stop"}),
    "branch on a share": (branch_on_share, {}),
    "nested pipelines": (nested, {}),
    "branches inside a nested pipeline": (nested_branches, {}),
    "environment": (environment, {}),
    "retries": (retried, {"folder": "FOLDER"}),
    "order without data": (ordered, {"folder": "FOLDER"}),
    "artifact as a return value": (artifact_returned, {}),
    "text of 20 KB": (long_text, {"name": "x" * 20_000}),
    "loop over constants": (loop_over_constants, {}),
    "loop over structs": (loop_over_structs, {}),
    "loop over an output, one at a time": (loop_over_an_output, {}),
    "nested loops with the item of the outer one": (nested_loops, {}),
    "loop over structs that a step made": (loop_over_made_structs, {}),
    "loop over an argument": (loop_over_an_argument, {"items": ["x", "y", "z"]}),
    "loop with a limit": (limited_loop, {}),
    "loop with a branch": (loop_with_a_branch, {}),
    "loop in a branch": (loop_in_a_branch, {}),
    "loop in a branch not taken": (loop_in_a_branch, {"x": -1.0}),
    "list of artifacts": (loop_of_artifacts, {}),
    "loop over nested pipelines": (loop_over_nested_pipelines, {}),
    "importer": (imported, {"uri": SMALL_FILE}),
}

# What kfp.local gets wrong: (pipeline, arguments, what it says or None, the right outputs)
KNOWN_BUGS = {
    "a placeholder in a value": (
        one_step,
        {"name": "{{$.pipeline_job_name}}"},
        None,
        {"Output": ["str", "hello, {{$.pipeline_job_name}}"]},
    ),
    "a whole number in an f-string": (
        formatted,
        {},
        None,
        {"Output": ["str", "hello, Ada <4> {Ada}"]},
    ),
    "optional parameter, not given": (
        optional_parameter,
        {},
        "Unknown value type",
        {"Output": ["str", "3 bee None 0.5"]},
    ),
    "optional parameter into a nested pipeline": (
        optional_into_nested,
        {},
        "Unknown value type",
        {"Output": ["str", "3 bee None 0.5"]},
    ),
    "whole numbers in lists": (
        whole_numbers_in_lists,
        {},
        None,
        {"given": ["str", "3{'a': 1}"], "made": ["str", "3{}"]},
    ),
    "branch on formatted text": (
        branch_on_formatted_text,
        {},
        None,
        {"Output": ["str", "hello, yes hello, no"]},
    ),
    "injected condition": (
        gate_on_text,
        {"text": "no' or 'a'=='a"},
        None,
        {"Output": ["str", "hello, refused"]},
    ),
    "a quote in a compared text": (
        gate_on_text,
        {"text": "it's"},
        "",
        {"Output": ["str", "hello, refused"]},
    ),
    "OneOf over artifacts": (
        one_of_artifacts,
        {},
        "Expected 1 artifact",
        {"Output": ["str", "Dataset:down:['length', 'tags']"]},
    ),
    "loops over what was given": (
        loops_over_what_was_given,
        {"items": ["x", "y"]},
        "Inner task failed",
        {"Output": ["str", "hello, x | hello, y-hello, x | hello, y"]},
    ),
    "loop over nothing": (loop_over_an_argument, {"items": []}, "", {"Output": ["str", ""]}),
    "importer of a file URI": (
        imported,
        {"uri": f"file://{SMALL_FILE}"},
        "",
        {"Output": ["str", "Dataset:small\n:['kind']"]},
    ),
    "text of 200 KB": (
        long_text,
        {"name": "x" * 200_000},
        "Argument list too long",
        {"Output": ["str", "hello, " + "x" * 200_000]},
    ),
}
