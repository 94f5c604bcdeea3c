"""The team: everything is done, by whoever comes, and who does not come is not waited for."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from cache.attention.cpu import team_address

PATIENCE = 20.0  # seconds for a helper that must come

Run = Callable[[Callable[[], None], int], None]


@pytest.fixture
def run() -> Run:
    """Calls the team with a function that every member calls."""
    address = team_address()
    if address is None:
        pytest.skip("no C++ compiler")
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    function = ctypes.CFUNCTYPE(None, work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)(address)

    def run(member: Callable[[], None], threads: int) -> None:
        function(work(lambda data: member()), None, threads, None)

    return run


class Meeting:
    """Work that is done when so many members have come to it, or when the time is over."""

    def __init__(self, members: int, seconds: float = PATIENCE) -> None:
        self._members = members
        self._seconds = seconds
        self._all = threading.Event()
        self.came: list[int] = []

    def __call__(self) -> None:
        self.came.append(threading.get_ident())
        if len(self.came) >= self._members:
            self._all.set()
        self._all.wait(self._seconds)


def together_once(run: Run, members: int) -> set[int]:
    """Who came to the first meeting that was complete: on a busy machine the caller works alone for a while."""
    until = time.monotonic() + PATIENCE
    while True:
        meeting = Meeting(members, 0.5)
        run(meeting, members)
        if len(set(meeting.came)) == members or time.monotonic() > until:
            return set(meeting.came)


def test_helpers_come(run: Run) -> None:
    came = together_once(run, 3)
    assert len(came) == 3
    assert threading.get_ident() in came


def test_helpers_that_sleep_come_too(run: Run) -> None:
    for pause in (0.0, 0.2, 0.0, 0.2):
        time.sleep(pause)
        assert len(together_once(run, 2)) == 2


def test_one_thread_is_the_caller(run: Run) -> None:
    meeting = Meeting(1)
    run(meeting, 1)
    assert meeting.came == [threading.get_ident()]


def test_who_has_come_is_waited_for(run: Run) -> None:
    ended: list[int] = []
    meeting = Meeting(2, 0.5)

    def member() -> None:
        meeting()
        if threading.get_ident() != caller:
            time.sleep(0.2)
        ended.append(threading.get_ident())

    caller = threading.get_ident()
    together_once(run, 2)
    run(member, 2)
    assert len(ended) == len(meeting.came)


def test_no_more_come_than_were_asked_for(run: Run) -> None:
    run(Meeting(4, 0.5), 4)  # now there are three helpers
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
