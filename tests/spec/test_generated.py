"""Generated files are what the code would generate now."""

import json
from pathlib import Path

import pytest

from rekindle.spec.load import load_target
from tools.generate import generated, pipelines

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", sorted(generated(CONFIGS)))
def test_the_file_is_fresh(name):
    assert (CONFIGS / name).read_text() == generated(CONFIGS)[name], "run `make generate`"


def test_the_shipped_pipelines_are_what_they_compile_to():
    for name, text in pipelines().items():
        assert (CONFIGS / name).read_text() == text, "run `make generate`"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_the_shipped_configs_load_and_obey_the_schema(path):
    import jsonschema
    import yaml

    load_target(path)
    values = yaml.safe_load(
        path.read_text()
        .replace("3e-3", "0.003")
        .replace("2e-3", "0.002")
        .replace("3e-5", "0.00003")
    )
    jsonschema.validate(values, json.loads((CONFIGS / "schema.json").read_text()))
