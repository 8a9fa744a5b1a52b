"""Options of the whole suite."""

import argparse
import gc
import inspect
import os
import sys
import time
from pathlib import Path

import pytest

try:
    import hypothesis
except ImportError:  # the environment of make test-oldest, which has no such test
    pass
else:
    # times are measured elsewhere: a busy machine, or one that makes its table of characters
    # first, fails no test
    hypothesis.settings.register_profile(
        "rekindle", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.register_profile(
        "many", hypothesis.settings.get_profile("rekindle"), max_examples=20_000
    )
    hypothesis.settings.load_profile("rekindle")

# what takes longest goes first, so that two processes end together
FIRST = ("tests/e2e/", "tests/train/", "tests/docs/", "tests/launch/", "tests/platforms/")


# What collection imports stays until the end: the collector of cycles walks over it in vain, and would
# again in every full collection during the tests.
gc.disable()


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate", action="store_true", help="rewrite golden files instead of comparing"
    )
    parser.addoption("--seeds", default="", help="FIRST:END of tests/conformance/test_generated.py")


# Slow tests that only a change below one folder of the library can break, or that need a cluster: targets of their own.
MATRICES = (
    "tests/engines/",
    "tests/kubeflow_cluster/",
    "tests/plan/test_memory.py",
    "tests/platforms/azureml/",
    "tests/platforms/kubeflow/",
    "tests/platforms/sagemaker/",
    "tests/platforms/test_removed.py",
    "tests/platforms/vertex/",
    "tests/train/test_layouts.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(MATRICES) and item.get_closest_marker("slow"):
            item.add_marker("matrix")
    items.sort(key=lambda item: _turn(item.nodeid))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def _turn(nodeid):
    return next((i for i, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST))


# whatever trains here is forked from one process, in which these were imported; environments may differ in what none of them reads
TRAINING = (
    "tests/e2e/",
    "tests/train/",
    "tests/docs/",
    "tests/launch/",
    "tests/engines/",
    "tests/evaluate/",
    "tests/cli/",
    "tests/platforms/local/",
)
PRELOADED = (
    "torch.distributed.run",
    "rekindle.train.worker",
    "rekindle.train.score_rank",
    "transformers.modeling_layers",
    "transformers.activations",
    "pandas",
)
READ_BY_IMPORTS = r"PYTHON(?!IOENCODING)|LD_|OMP_|GOMP_|MKL_|OPENBLAS_|TORCH_(?!ELASTIC)|PYTORCH|HF_|TRANSFORMERS|CUDA|JE_|MALLOC|TMP"


@pytest.fixture(autouse=True, scope="session")
def _preloaded(request):
    if not any(item.nodeid.startswith(TRAINING) for item in request.session.items):
        yield
        return
    from rekindle.launch.preloaded import Preloaded

    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))  # as many tests have it
    server = Preloaded(PRELOADED, rf"(?!{READ_BY_IMPORTS})\w+")
    os.environ |= server.environment
    server.start(os.environ)
    yield
    server.close()


@pytest.fixture(autouse=True)
def _no_store_of_another_test():
    """s3fs keeps its clients by their arguments, and each test's server has an address of its own."""
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def _alone():
    """What a platform tells a node stands in its environment; a test that plays a node leaves it there."""
    yield
    os.environ.pop("REKINDLE_RENDEZVOUS", None)


# seconds between two looks at how fast the machine is
EVERY = 10
SOURCE = inspect.getsource(argparse)
_looked = 0.0


@pytest.fixture(autouse=True)
def _pace(record_property):
    """Leave with some tests the milliseconds that Python takes to compile one file: what durations.py holds times against."""
    global _looked
    if time.monotonic() - _looked > EVERY:
        began = time.thread_time()
        compile(SOURCE, "argparse.py", "exec")
        record_property("pace", round(1000 * (time.thread_time() - began), 2))
        _looked = time.monotonic()
