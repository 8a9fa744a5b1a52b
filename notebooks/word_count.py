"""A pipeline of two steps, in plain KFP: 03_platforms.ipynb compiles it for four platforms."""

from kfp import dsl


@dsl.component(base_image="python:3.11")
def count(text: str, counts: dsl.Output[dsl.Dataset]):
    import collections
    import json

    words = collections.Counter(text.lower().split())
    with open(counts.path, "w") as file:
        json.dump(words, file)
    print(f"{words.total()} words, {len(words)} of them different")


@dsl.component(base_image="python:3.11")
def most(counts: dsl.Input[dsl.Dataset], at_least: int) -> str:
    import json

    with open(counts.path) as file:
        words = json.load(file)
    return ", ".join(f"{word} {n}" for word, n in words.items() if n >= at_least)


@dsl.pipeline(name="word-count")
def word_count(text: str, at_least: int = 2):
    counted = count(text=text)
    most(counts=counted.outputs["counts"], at_least=at_least)
