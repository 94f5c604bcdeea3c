"""The prefix index against a brute-force search, and the shape of its tree."""

from __future__ import annotations

import random
from array import array

import pytest
from session_kit import session_of

from cache.pages.prefix import PrefixIndex, PrefixIndexes, _Node
from cache.pages.session import SessionCache


def shared(a: list[int], b: list[int]) -> int:
    """Common prefix, the slow way."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def check_tree(index: PrefixIndex[SessionCache], stored: dict[SessionCache, list[int]]) -> None:
    """No node is empty or needless, edges and parents agree, and every session's path spells its tokens."""
    found: dict[SessionCache, list[int]] = {}

    def walk(node: _Node[SessionCache], above: list[int]) -> None:
        for first, child in node.children.items():
            assert child.parent is node
            assert len(child.tokens) > 0
            assert child.tokens[0] == first
            assert child.sessions or len(child.children) >= 2
            path = above + list(child.tokens)
            found.update(dict.fromkeys(child.sessions, path))
            walk(child, path)

    assert not index._root.sessions
    walk(index._root, [])
    assert found == {session: tokens for session, tokens in stored.items() if tokens}
    assert len(index) == len(found)


@pytest.mark.parametrize(("seed", "alphabet", "longest"), [(1, 2, 12), (2, 3, 30), (3, 50, 6), (4, 1, 20)])
def test_random_puts_and_removes_against_brute_force(seed: int, alphabet: int, longest: int) -> None:
    rng = random.Random(seed)
    index: PrefixIndex[SessionCache] = PrefixIndex()
    stored: dict[SessionCache, list[int]] = {}
    for _ in range(600):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, longest))]
        if stored and rng.random() < 0.3:
            tokens = (rng.choice(list(stored.values())) + tokens)[: 2 * longest]
        action = rng.random()
        if action < 0.4 or not stored:
            session = session_of(tokens)
            index.put(session)
            stored[session] = tokens
        elif action < 0.6:  # what a session has cached changes: it is put again
            session = rng.choice(list(stored))
            session.cut(0)
            session.token_ids = array("i", tokens)
            session.on_fed(len(tokens))
            index.put(session)
            stored[session] = tokens
        elif action < 0.85:
            session = rng.choice(list(stored))
            index.remove(session)
            del stored[session]
        check_tree(index, stored)
        found, depth = index.match(array("i", tokens))
        best = max((shared(tokens, other) for other in stored.values()), default=0)
        assert depth == best
        if best == 0:
            assert found is None
        else:
            assert found is not None
            assert shared(stored[found], tokens) == best
            if any(len(other) == best and shared(other, tokens) == best for other in stored.values()):
                assert len(stored[found]) == best  # one that ends there is preferred


def test_nothing_is_found_in_an_empty_index_or_for_an_empty_prompt() -> None:
    index: PrefixIndex[SessionCache] = PrefixIndex()
    assert index.match(array("i", [1, 2])) == (None, 0)
    index.put(session_of([1, 2]))
    assert index.match(array("i")) == (None, 0)
    assert index.match(array("i", [2, 1])) == (None, 0)


def test_removing_an_unknown_session_changes_nothing() -> None:
    index: PrefixIndex[SessionCache] = PrefixIndex()
    known = session_of([1, 2, 3])
    index.put(known)
    index.remove(session_of([1, 2, 3]))
    assert index.match(array("i", [1, 2, 3])) == (known, 3)


def test_tokens_that_are_not_fed_yet_are_not_found() -> None:
    index: PrefixIndex[SessionCache] = PrefixIndex()
    session = session_of([1, 2])
    session.token_ids.extend([3, 4])
    index.put(session)
    assert index.match(array("i", [1, 2, 3, 4])) == (session, 2)


def test_tokens_from_a_hidden_one_on_are_not_found() -> None:
    index: PrefixIndex[SessionCache] = PrefixIndex()
    session = session_of([1, 2, 3, 4, 5])
    session.hide(2, 3)
    index.put(session)
    assert index.match(array("i", [1, 2, 3, 4, 5])) == (session, 2)


def test_the_session_that_was_put_last_wins_a_tie() -> None:
    index: PrefixIndex[SessionCache] = PrefixIndex()
    first, second = session_of([1, 2]), session_of([1, 2])
    index.put(first)
    index.put(second)
    assert index.match(array("i", [1, 2, 3]))[0] is second
    index.put(first)
    assert index.match(array("i", [1, 2, 3]))[0] is first


def test_what_has_no_sessions_has_no_index() -> None:
    indexes: PrefixIndexes[SessionCache] = PrefixIndexes()
    first, second = session_of([1, 2]), session_of([1, 3])
    assert indexes.match("a", False, array("i", [1])) == (None, 0)
    indexes.put("a", False, session_of([]))
    indexes.remove("b", False, first)
    assert len(indexes) == 0
    indexes.put("a", False, first)
    indexes.put("a", True, second)
    assert indexes.match("a", False, array("i", [1, 3])) == (first, 1)
    assert indexes.match("a", True, array("i", [1, 3])) == (second, 2)
    assert indexes.check_integrity() == 2
    indexes.remove("a", False, first)
    assert len(indexes) == 1
    second.cut(0)
    indexes.put("a", True, second)
    assert len(indexes) == 0
