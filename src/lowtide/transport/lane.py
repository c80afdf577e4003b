"""Work in the background, strictly in order: one thread, one queue, and jobs that can be waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import TransportError
from lowtide.messages import Inbox, Tag

_POLL = 0.1  # seconds; what Ctrl-C waits at most


@dataclass(frozen=True)
class Deferred:
    """The `Pending` of all our transports: `complete` is called by `finish`."""

    complete: Callable[[], Inbox]

    def finish(self) -> Inbox:
        """Wait for the inbox. Called exactly once."""
        return self.complete()


class Job:
    """One message that a lane moves; done when it has an inbox or an error."""

    def __init__(self, work: Callable[[], Inbox], tag: Tag) -> None:
        self.tag = tag
        self.taken = False
        self._work = work
        self._done = threading.Event()
        self._inbox: Inbox | None = None
        self._error: BaseException | None = None  # raised in the thread that waits

    def run(self) -> None:
        """Do the work and keep what came of it; called by the lane."""
        try:
            self._inbox = self._work()
        except BaseException as error:  # noqa: BLE001 - every error belongs to whoever waits for the job
            self._error = error
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """True once the job is done, False after `seconds`.

        Waits in short turns, so that Ctrl-C is obeyed at once.
        """
        deadline = time.monotonic() + seconds
        while not self._done.wait(_POLL):
            if time.monotonic() > deadline:
                return False
        return True

    def result(self) -> Inbox:
        """The inbox of a finished job, or its error."""
        if self._error is not None:
            raise self._error
        if self._inbox is None:
            raise TransportError(f"{describe(self.tag)} is not finished")
        return self._inbox


class Lane:
    """A daemon thread that runs jobs one after the other, in the order they were put."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A daemon, since gloo cannot be woken from a wait: the process must be able to end all the same.
        self._thread = threading.Thread(target=self._run, name=f"lowtide-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        self._queue.put(job)

    def stop(self) -> None:
        """End the thread after the jobs that were put before."""
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most `seconds`; a stuck one is left behind, it is a daemon."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            # Waiting for the next one must not keep alive what this one refers to.
            del job


def describe(tag: Tag) -> str:
    """How errors name a message.

    >>> describe(Tag("delta", event=3, leg=1))
    "plan 'delta', event 3, leg 1"
    """
    return f"plan {tag.plan!r}, event {tag.event}, leg {tag.leg}"
