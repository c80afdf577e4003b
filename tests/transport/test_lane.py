from __future__ import annotations

import signal
import threading
import time

import pytest

from lowtide.errors import AgreementError, PeerLostError, TransportError
from lowtide.messages import Inbox, Tag
from lowtide.transport.fault import Fault, again
from lowtide.transport.lane import Job, Lane, describe

TAG = Tag("plan", 3, 1)


def test_jobs_run_in_order_in_one_thread_that_is_not_ours():
    seen, lane = [], Lane("test")

    def work(number):
        seen.append((number, threading.get_ident()))
        return Inbox((number,))

    jobs = [Job(lambda number=number: work(number), TAG) for number in range(20)]
    for job in jobs:
        lane.put(job)
    assert all(job.wait(10.0) for job in jobs)
    assert [job.result().ranks for job in jobs] == [(number,) for number in range(20)]
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
    lane.stop()
    lane.join(10.0)
    assert not lane._thread.is_alive()


def test_an_error_belongs_to_its_job_and_the_lane_goes_on():
    lane = Lane("test")
    bad, good = Job(lambda: 1 / 0, TAG), Job(lambda: Inbox(()), TAG)
    lane.put(bad)
    lane.put(good)
    assert good.wait(10.0)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == Inbox(())
    lane.stop()


def test_a_job_that_is_not_done_has_no_result():
    job = Job(lambda: Inbox(()), TAG)
    assert not job.wait(0.0)
    with pytest.raises(TransportError, match="plan 'plan', event 3, leg 1 is not finished"):
        job.result()


def test_ctrl_c_ends_a_wait_within_half_a_second():
    job, pressed = Job(lambda: Inbox(()), TAG), []

    def press() -> None:
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Timer(0.05, press).start()
    with pytest.raises(KeyboardInterrupt):
        job.wait(30.0)
    assert time.monotonic() - pressed[0] < 0.5


def test_the_first_fault_is_kept_and_raised_afresh():
    fault = Fault()
    fault.check()
    assert fault.error is None
    assert fault.keep(AgreementError("first"))
    assert not fault.keep(TransportError("second"))
    errors = []
    for _ in range(2):
        with pytest.raises(AgreementError, match=r"^the transport is broken since: first$") as error:
            fault.check()
        errors.append(error.value)
    assert errors[0] is not errors[1]


@pytest.mark.parametrize(
    "error", [AgreementError("x"), TransportError("x"), PeerLostError("x", ranks=[1, 2])], ids=repr
)
def test_an_error_is_the_same_again(error):
    other = again(error, "so: ")
    assert type(other) is type(error)
    assert str(other) == "so: x"
    assert getattr(other, "ranks", None) == getattr(error, "ranks", None)


def test_a_message_is_described_by_plan_event_and_leg():
    assert describe(TAG) == "plan 'plan', event 3, leg 1"
