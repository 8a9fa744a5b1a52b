"""Options of the whole suite."""

# what takes longest goes first, so that two processes end together
FIRST = ("tests/e2e/", "tests/train/", "tests/docs/", "tests/launch/", "tests/platforms/")


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate", action="store_true", help="rewrite golden files instead of comparing"
    )


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _turn(item.nodeid))


def _turn(nodeid):
    return next((i for i, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST))
