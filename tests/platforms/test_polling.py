"""How often something that changes by itself is looked at, and for how long."""

import itertools
import time

from rekindle.platforms.polling import polls


def test_without_time_there_is_one_look_and_no_pause() -> None:
    began = time.monotonic()
    assert len(list(polls(-1.0, 60.0))) == 1
    assert time.monotonic() - began < 30.0


def test_looks_go_on_until_one_is_over_after_the_limit_with_a_pause_between_two() -> None:
    looks = []
    began = time.monotonic()
    for _ in polls(0.2, 0.05):
        looks.append(time.monotonic())
    assert time.monotonic() - began > 0.2
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(looks))


def test_who_has_seen_enough_leaves_without_a_pause() -> None:
    began = time.monotonic()
    for _ in polls(60.0, 60.0):
        break
    else:
        raise AssertionError("the limit has not passed")
    assert time.monotonic() - began < 30.0
