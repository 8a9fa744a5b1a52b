"""Pipelines by chance: the source of a KFP pipeline for a seed, of conditions, loops, lists, nested
pipelines, artifacts, OneOf, container components, optional inputs and names that collide with ours,
in each other, as far as KFP's compiler takes them; with importers of every scheme and settings of
kfp-kubernetes where these are asked for. Its output is a number made of what it left."""

from __future__ import annotations

import dataclasses
import random

COMPONENTS = """
from typing import List, Optional
from kfp import dsl, kubernetes
component = dsl.component(base_image="python:3.11", install_kfp_package=False)

@component
def add(a: int, b: int) -> int:
    return a + b

@component
def greet(name: str) -> str:
    return f"hello, {name}"

@component
def size(text: str) -> int:
    return len(text)

@component
def above(x: int, bound: int) -> bool:
    return x > bound

@component
def total(items: List[int]) -> int:
    return sum(items)

@component
def count_to(n: int) -> List[int]:
    return list(range(n % 3 + 1))

@component
def make(text: str, data: dsl.Output[dsl.Dataset]):
    with open(data.path, "w") as file:
        file.write(text)
    data.metadata["length"] = len(text)

@component
def measure(data: dsl.Input[dsl.Dataset]) -> int:
    with open(data.path) as file:
        return len(file.read()) + data.metadata["length"]

@component
def fingerprint(name: str, task: str = "t", source: str = "s", command: str = "c", work: str = "w",
                result: str = "r", outputs: str = "o", parent: str = "p", executor_input: int = 1) -> str:
    return "|".join([name, task, source, command, work, result, outputs, parent, str(executor_input)])

@component
def chosen(word: Optional[str] = None, data: dsl.Input[dsl.Dataset] = None, n: int = 2) -> str:
    return f"{word} {data is None} {n}"

@component
def place_of(data: dsl.Input[dsl.Artifact]) -> str:
    return data.uri

@dsl.container_component
def write(text: str, out: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="IMAGE", args=[text, out],
        command=["sh", "-c", 'mkdir -p "$(dirname "$1")"; printf "<%s>" "$0" > "$1"'],
    )

@dsl.container_component
def perhaps(out: dsl.OutputPath(str), word: Optional[str] = None):
    return dsl.ContainerSpec(
        image="IMAGE",
        command=["sh", "-c", 'mkdir -p "$(dirname "$0")"; printf "%s" "$*" > "$0"', out],
        args=[dsl.IfPresentPlaceholder("word", then=["given", dsl.ConcatPlaceholder(["(", word, ")"])],
                                       else_=["none"])],
    )

@dsl.container_component
def copy(given: dsl.Input[dsl.Dataset], copied: dsl.Output[dsl.Dataset]):
    return dsl.ContainerSpec(
        image="IMAGE", args=[given.path, copied.path],
        command=["sh", "-c", 'mkdir -p "$(dirname "$1")"; cp "$0" "$1"'],
    )

@component
def letters(data: dsl.Input[dsl.Dataset]) -> int:
    with open(data.path) as file:
        return len(file.read())
"""
SCHEMES = ("gs", "s3", "minio", "https", "oci", "abfss", "hdfs")
SETTINGS = (
    "kubernetes.add_node_selector({}, 'disk', 'ssd')",
    "kubernetes.add_toleration({}, key='spot', operator='Exists', effect='NoSchedule')",
    "kubernetes.add_pod_label({}, 'team', 'a')",
    "kubernetes.add_pod_annotation({}, 'note', 'b')",
    "kubernetes.set_image_pull_policy({}, 'Always')",
    "kubernetes.set_image_pull_secrets({}, ['pull'])",
    "kubernetes.use_field_path_as_env({}, 'NODE', 'spec.nodeName')",
    "kubernetes.use_secret_as_env({}, 'key', {{'k': 'KEY'}})",
    "kubernetes.use_secret_as_volume({}, 'key', mount_path='/key')",
    "kubernetes.use_config_map_as_env({}, 'map', {{'k': 'MAP'}})",
    "kubernetes.empty_dir_mount({}, 'scratch', '/scratch')",
    "kubernetes.mount_pvc({}, 'claim', '/claim')",
    "kubernetes.set_timeout({}, 3600)",
    "kubernetes.set_security_context({}, run_as_user=1000)",
    "kubernetes.add_ephemeral_volume({}, 'more', '/more', ['ReadWriteOnce'], '1Gi')",
)


@dataclasses.dataclass
class _Known:
    """The expressions that may be read where we are."""

    ints: list[str]
    texts: list[str]
    data: list[str]
    tasks: list[str]

    def inner(self) -> _Known:
        """A copy for a block in this one, which may not wait for our tasks."""
        return _Known([*self.ints], [*self.texts], [*self.data], [])


class _Author:
    def __init__(self, seed: int, containers: bool, settings: bool) -> None:
        self.chance = random.Random(seed)
        self.containers, self.settings = containers, settings
        self.lines: list[str] = []
        self.indent = 1
        self.number = 0

    def name(self) -> str:
        self.number += 1
        return f"t{self.number}"

    def write(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def task(self, known: _Known, call: str) -> str:
        """A call of a component, with options."""
        name = self.name()
        self.write(f"{name} = {call}")
        if self.chance.random() < 0.2:
            self.write(f"{name}.set_caching_options(False)")
        if self.chance.random() < 0.15:
            self.write(f"{name}.set_retry(1)")
        if known.tasks and self.chance.random() < 0.2:
            self.write(f"{name}.after({self.chance.choice(known.tasks)})")
        if self.settings and not call.startswith("inner(") and self.chance.random() < 0.3:
            self.write(self.chance.choice(SETTINGS).format(name))
        known.tasks.append(name)
        return name

    def block(self, known: _Known, depth: int) -> None:
        """One to three statements; a block of a condition or loop is never empty."""
        known.ints.append(f"{self.task(known, f'add(a={self.an_int(known)}, b=1)')}.output")
        for _ in range(self.chance.randint(0, 2)):
            kinds = [self.integer, self.text, self.artifact]
            if depth:
                kinds += [self.branches, self.loop, self.loop, self.one_of]
            kind = self.chance.choice(kinds)
            if kind in (self.integer, self.text, self.artifact):
                kind(known)  # type: ignore[call-arg]
            else:
                kind(known, depth - 1)  # type: ignore[call-arg]

    def an_int(self, known: _Known) -> str:
        return self.chance.choice([*known.ints, str(self.chance.randint(-3, 9))])

    def a_text(self, known: _Known) -> str:
        return self.chance.choice(
            [*known.texts, repr(self.chance.choice(["a", "it's", "{x}", ""]))]
        )

    def integer(self, known: _Known) -> None:
        calls = [
            f"add(a={self.an_int(known)}, b={self.an_int(known)})",
            f"size(text={self.a_text(known)})",
        ]
        if known.data:
            calls.append(f"measure(data={self.chance.choice(known.data)})")
        known.ints.append(f"{self.task(known, self.chance.choice(calls))}.output")

    def text(self, known: _Known) -> None:
        text, number = self.a_text(known), self.an_int(known)
        calls = [
            f"greet(name={text})",
            "chosen()",
            f"chosen(word={text}, n={number})",
            f"fingerprint(name={text}, source={self.a_text(known)}, executor_input={number})",
        ]
        if self.containers:
            calls += [f"write(text={text})", "perhaps()", f"perhaps(word={text})"]
        if known.data:
            calls.append(f"chosen(data={self.chance.choice(known.data)})")
        known.texts.append(f"{self.task(known, self.chance.choice(calls))}.output")

    def artifact(self, known: _Known) -> None:
        if self.containers and known.data and self.chance.random() < 0.3:
            copied = self.task(known, f"copy(given={self.chance.choice(known.data)})")
            known.ints.append(f"{self.task(known, f'letters(data={copied}.output)')}.output")
            return
        known.data.append(f"{self.task(known, f'make(text={self.a_text(known)})')}.outputs['data']")

    def importers(self, known: _Known) -> None:
        """Of one scheme or two, for whose artifacts nothing has to be there."""
        for scheme in self.chance.sample(SCHEMES, 2):
            name = self.name()
            self.write(
                f"{name} = dsl.importer(artifact_uri='{scheme}://place/{name}', "
                f"artifact_class=dsl.Dataset, reimport={self.chance.choice([True, False])})"
            )
            known.texts.append(f"{self.task(known, f'place_of(data={name}.output)')}.output")

    def condition(self, known: _Known) -> str:
        if self.chance.random() < 0.5:
            asked = self.task(known, f"above(x={self.an_int(known)}, bound=2)")
            return f"{asked}.output == {self.chance.choice([True, False])}"
        left = self.chance.choice(known.ints)
        return (
            f"{left} {self.chance.choice(['>', '<', '==', '!=', '>='])} {self.chance.randint(0, 6)}"
        )

    def within(self, head: str, known: _Known, depth: int) -> _Known:
        inner = known.inner()
        self.write(f"with {head}:")
        self.indent += 1
        self.block(inner, depth)
        self.indent -= 1
        return inner

    def branches(self, known: _Known, depth: int) -> None:
        self.within(f"dsl.If({self.condition(known)})", known, depth)
        if self.chance.random() < 0.4:
            self.within(f"dsl.Elif({self.chance.choice(known.ints)} > 3)", known, depth)
        if self.chance.random() < 0.5:
            self.within("dsl.Else()", known, depth)

    def one_of(self, known: _Known, depth: int) -> None:
        """One of two values, whichever branch ran."""
        yes = self.within(f"dsl.If({self.condition(known)})", known, 0)
        no = self.within("dsl.Else()", known, 0)
        chosen = self.name()
        self.write(f"{chosen} = dsl.OneOf({yes.ints[-1]}, {no.ints[-1]})")
        known.ints.append(chosen)

    def loop(self, known: _Known, depth: int) -> None:
        inner, name = known.inner(), self.name()
        items, ints, texts = self.chance.choice(
            [
                ("[1, 2]", [name], []),
                ("['x', 'yy', 'z']", [], [name]),
                ("[{'n': 1, 's': 'p'}, {'n': 4, 's': 'q'}]", [f"{name}.n"], [f"{name}.s"]),
                ("numbers", [name], []),
                ("numbers", [name], []),
                (f"count_to(n={self.an_int(known)}).output", [name], []),
            ]
        )
        inner.ints += ints
        inner.texts += texts
        limit = self.chance.choice(["", "", ", parallelism=1", ", parallelism=2"])
        self.write(f"with dsl.ParallelFor({items}{limit}) as {name}:")
        self.indent += 1
        # kfp 2.17 writes a loop in a condition wrong if nobody reads its item
        call = f"size(text={texts[0]})" if texts else f"add(a={ints[0]}, b={self.an_int(known)})"
        given = f"{self.task(inner, call)}.output"
        inner.ints.append(given)
        if depth:
            self.block(inner, depth - 1)
        self.indent -= 1
        if self.chance.random() < 0.6:
            known.ints.append(f"{self.task(known, f'total(items=dsl.Collected({given}))')}.output")


def source(seed: int, image: str = "", on_kubernetes: bool = False) -> str:
    """A module whose function `generated` is the pipeline, with an inner one in every third; with
    container components if there is an `image` for them, with importers and settings of pods if it
    is `on_kubernetes`."""
    author = _Author(seed, bool(image), on_kubernetes)
    known = _Known(["n"], ["word", "name", "task"], [], [])
    parameters = "n: int = 3, word: str = 'w', numbers: List[int] = [2, 5]"
    own = "name: str = 'mine', task: str = 'also mine', artifact_root: str = '', train: str = '{}'"
    text = COMPONENTS.replace("IMAGE", image)
    if seed % 3 == 0:
        inner = _Known(["n"], ["word"], [], [])
        author.block(inner, 0)  # kfp 2.17 loses conditions that both pipelines have
        author.write(f"return {inner.ints[-1]}")
        text += (
            f"\n@dsl.pipeline\ndef inner({parameters}) -> int:\n" + "\n".join(author.lines) + "\n"
        )
        author.lines = []
        called = author.task(known, "inner(n=n, word='inside', numbers=[1])")
        known.ints.append(f"{called}.output")
    if on_kubernetes:
        author.importers(known)
    for _ in range(3):
        author.block(known, 2)
    author.write(f"return add(a={known.ints[-1]}, b={known.ints[-2]}).output")
    signature = f"({parameters}, {own}) -> int"
    return text + f"\n@dsl.pipeline\ndef generated{signature}:\n" + "\n".join(author.lines) + "\n"
