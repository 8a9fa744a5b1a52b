"""What the tests of training share."""

from tests.support.train_resume import nothing_left, shards  # noqa: F401 - fixtures
