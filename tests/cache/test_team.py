"""The team: everything is done, by whoever comes, and who does not come is not waited for."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from cache.native import together

PATIENCE = 20.0  # seconds for a helper that must come

Run = Callable[[Callable[[], None], int], None]


@pytest.fixture
def run() -> Run:
    """Calls the team with a function that every member calls."""
    address = together()
    if address is None:
        pytest.skip("no C++ compiler")
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    function = ctypes.CFUNCTYPE(None, work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)(address)

    def run(member: Callable[[], None], threads: int) -> None:
        function(work(lambda data: member()), None, threads, None)

    return run


class Meeting:
    """Work that is done when so many members have come to it, or when the time is over."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._all = threading.Event()
        self.came: list[int] = []

    def __call__(self) -> None:
        self.came.append(threading.get_ident())
        if len(self.came) >= self._members:
            self._all.set()
        self._all.wait(PATIENCE)


def test_helpers_come(run: Run) -> None:
    meeting = Meeting(3)
    run(meeting, 3)
    assert len(set(meeting.came)) == 3
    assert threading.get_ident() in meeting.came


def test_helpers_that_sleep_come_too(run: Run) -> None:
    for pause in (0.0, 0.2, 0.0, 0.2):
        time.sleep(pause)
        meeting = Meeting(2)
        run(meeting, 2)
        assert len(set(meeting.came)) == 2


def test_one_thread_is_the_caller(run: Run) -> None:
    meeting = Meeting(1)
    run(meeting, 1)
    assert meeting.came == [threading.get_ident()]


def test_who_has_come_is_waited_for(run: Run) -> None:
    ended: list[int] = []
    meeting = Meeting(2)

    def member() -> None:
        meeting()
        if threading.get_ident() != caller:
            time.sleep(0.2)
        ended.append(threading.get_ident())

    caller = threading.get_ident()
    run(member, 2)
    assert len(ended) == 2


def test_no_more_come_than_were_asked_for(run: Run) -> None:
    run(Meeting(4), 4)  # now there are three helpers
    for _ in range(50):
        came: list[int] = []

        def member(came: list[int] = came) -> None:
            came.append(threading.get_ident())
            time.sleep(0.002)

        run(member, 2)
        assert len(came) <= 2


def test_a_second_caller_works_alone(run: Run) -> None:
    begun, over = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        over.wait(PATIENCE)

    thread = threading.Thread(target=run, args=(first, 2))
    thread.start()
    begun.wait(PATIENCE)
    came: list[int] = []
    run(lambda: came.append(threading.get_ident()), 2)
    assert came == [threading.get_ident()]
    assert not over.is_set()
    over.set()
    thread.join()
