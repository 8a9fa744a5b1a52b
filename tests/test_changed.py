"""What `make test-changed` runs for a change of which files."""

from __future__ import annotations

import pytest

from tests.changed import affected, distances

CASES = {
    # changed file, a file of tests that is near, one that is far, one that it cannot break
    "rekindle/platforms/sagemaker/jobs.py": (
        "tests/platforms/sagemaker/test_compile.py",
        "",
        "tests/platforms/vertex/test_lowering.py",
    ),
    "rekindle/serve/wire.py": ("tests/serve/test_routes.py", "", "tests/train/test_layouts.py"),
    "rekindle/data/order.py": ("tests/data/test_order.py", "tests/cli/test_watch.py", ""),
    "rekindle/report/verdicts.py": ("tests/report/test_collect.py", "", "tests/train/test_dcp.py"),
    "rekindle/report/templates/card.html.j2": (
        "tests/report/test_collect.py",
        "",
        "tests/train/test_dcp.py",
    ),
    "docs/gate.md": ("tests/docs/test_readmes.py", "", "tests/ir/test_compile.py"),
    "configs/digits.yaml": ("tests/spec/test_generated.py", "", "tests/serve/test_routes.py"),
    # a script that another process is given names it in a string
    "rekindle/launch/node.py": ("tests/launch/test_torchrun.py", "", "tests/ir/test_features.py"),
    "pyproject.toml": ("", "tests/ir/test_compile.py", ""),
}


@pytest.mark.slow
def test_what_may_break_everything_leaves_what_is_near_its_slow_tests():
    near, far = affected({"pyproject.toml", "rekindle/serve/wire.py"})
    assert "tests/serve/test_routes.py" in near
    assert "tests/ir/test_compile.py" in far


@pytest.mark.slow
@pytest.mark.parametrize("changed", CASES)
def test_what_a_change_can_break_is_run_and_the_rest_is_not(changed):
    near_test, far_test, other_test = CASES[changed]
    near, far = affected({changed})
    assert not set(near) & set(far)
    assert not near_test or near_test in near
    assert not far_test or far_test in far
    assert other_test not in [*near, *far]


def test_a_distance_is_over_as_few_imports_as_there_are():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"a"}, "f": set()}
    assert distances(graph, ["d"]) == {"d": 0, "c": 1, "a": 2, "b": 2, "e": 3}
