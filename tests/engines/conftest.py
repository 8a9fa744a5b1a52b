"""What the tests of engines share."""

from tests.support.train_resume import nothing_left, shards  # noqa: F401 - fixtures
