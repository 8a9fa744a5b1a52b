"""Pipelines by chance: the source of a KFP pipeline for a seed, of conditions, loops, lists, nested
pipelines, artifacts and OneOf in each other, as far as KFP's compiler takes them."""

from __future__ import annotations

import dataclasses
import random

COMPONENTS = """
from typing import List
from kfp import dsl
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
"""


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
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
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
        known.texts.append(f"{self.task(known, f'greet(name={self.a_text(known)})')}.output")

    def artifact(self, known: _Known) -> None:
        known.data.append(f"{self.task(known, f'make(text={self.a_text(known)})')}.outputs['data']")

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
        items, ints, texts = self.chance.choice([
            ("[1, 2]", [name], []),
            ("['x', 'yy', 'z']", [], [name]),
            ("[{'n': 1, 's': 'p'}, {'n': 4, 's': 'q'}]", [f"{name}.n"], [f"{name}.s"]),
            ("numbers", [name], []),
            ("numbers", [name], []),
            (f"count_to(n={self.an_int(known)}).output", [name], []),
        ])  # fmt: skip
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


def source(seed: int) -> str:
    """A module whose function `generated` is the pipeline, with an inner one in every third."""
    author = _Author(seed)
    known = _Known(["n"], ["word"], [], [])
    signature = "(n: int = 3, word: str = 'w', numbers: List[int] = [2, 5])"
    text = COMPONENTS
    if seed % 3 == 0:
        author.block(known, 0)  # kfp 2.17 loses conditions that both pipelines have
        author.write(f"return {known.ints[-1]}")
        text += f"\n@dsl.pipeline\ndef inner{signature} -> int:\n" + "\n".join(author.lines) + "\n"
        author.lines = []
        known = _Known(["n"], ["word"], [], [])
        called = author.task(known, "inner(n=n, word='inside', numbers=[1])")
        known.ints.append(f"{called}.output")
    for _ in range(3):
        author.block(known, 2)
    return text + f"\n@dsl.pipeline\ndef generated{signature}:\n" + "\n".join(author.lines) + "\n"
