"""Options of the whole suite."""


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate", action="store_true", help="rewrite golden files instead of comparing"
    )
