from __future__ import annotations

import threading
import time

import pytest

from lowtide.errors import ConfigError
from lowtide.transport.clock import Clock


def test_steps_take_their_seconds_divided_by_the_speed():
    clock = Clock(speed=2.0, step_seconds=0.5)
    for _ in range(4):
        clock.step()
    clock.advance(3.0)
    assert (clock.seconds, clock.compute, clock.wait) == (2.5, 2.5, 0.0)


def test_waiting_ends_at_the_moment_and_never_before_now():
    clock = Clock(step_seconds=1.0)
    clock.step()
    clock.wait_until(4.0)
    clock.wait_until(2.0)
    assert (clock.seconds, clock.compute, clock.wait) == (4.0, 1.0, 3.0)


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_measured_compute_is_the_time_of_the_thread_while_it_runs():
    clock = Clock()
    clock.resume()
    busy(0.02)
    before = clock.seconds
    clock.pause()
    busy(0.02)
    assert before >= 0.02
    assert clock.compute < before + 0.02
    assert clock.seconds == clock.compute


def test_a_slow_replica_needs_longer_for_the_same():
    clock = Clock(speed=0.25)
    clock.resume()
    busy(0.01)
    clock.pause()
    assert clock.compute >= 0.04


def test_the_time_of_other_threads_does_not_count():
    clock = Clock()
    clock.resume()
    other = threading.Thread(target=busy, args=(0.2,))
    other.start()
    other.join()
    clock.pause()
    assert clock.compute < 0.1


def test_measured_clocks_ignore_steps_and_given_ones_ignore_the_thread():
    measured, given = Clock(), Clock(step_seconds=0.0)
    measured.step()
    given.resume()
    busy(0.01)
    given.pause()
    assert (measured.seconds, given.seconds) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [{"speed": 0.0}, {"speed": float("nan")}, {"step_seconds": -1.0}])
def test_impossible_clocks_are_refused(bad):
    with pytest.raises(ConfigError, match="hint: "):
        Clock(**bad)
