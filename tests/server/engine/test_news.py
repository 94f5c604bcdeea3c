"""An event for one waiter."""

import asyncio

import pytest

from server.engine.news import News


async def test_a_waiter_is_woken_once_it_is_set_and_waits_again_when_it_was_cleared() -> None:
    news = News()
    waiting = asyncio.create_task(news.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    news.set()
    news.set()  # it has not come to its turn yet
    await waiting
    await news.wait()
    news.clear()
    assert not news.is_set()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(news.wait(), 0.01)
    news.set()  # nobody waits any more
    await news.wait()
