"""The prefix cache's index: a radix tree per tenant that finds the session with the longest cached prefix of a prompt.

The idea is SGLang's RadixAttention (Zheng et al., 2023); here the tree holds no KV, it only finds a session, and
matches are exact to the token.
"""

from __future__ import annotations

from array import array
from typing import Generic, Protocol, TypeVar

from cache.media_ids import uncut
from cache.pages.session import common_prefix


class Shareable(Protocol):
    """A cached or stored session, as the index needs it."""

    @property
    def shareable(self) -> array[int]:
        """The tokens whose KV may be reused by any other timeline with the same beginning."""


S = TypeVar("S", bound=Shareable)


class _Node(Generic[S]):
    """``tokens`` are on the edge from the parent; ``sessions`` are those whose cached tokens end at this node."""

    __slots__ = ("children", "parent", "sessions", "tokens")

    def __init__(self, tokens: array[int], parent: _Node[S] | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Node[S]] = {}
        self.sessions: dict[S, None] = {}


class PrefixIndex(Generic[S]):
    """Finds the session whose cached tokens share the longest prefix with a prompt, in time linear in that prefix.

    Invariant: every node but the root has a session or at least two children, so a leaf always has a session.
    """

    def __init__(self) -> None:
        self._root: _Node[S] = _Node(array("i"), None)
        self._nodes: dict[S, _Node[S]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, prompt: array[int]) -> tuple[S | None, int]:
        """The session with the longest common prefix with ``prompt``, and that prefix's length in tokens; (None, 0) if
        there is no common prefix. It ends in no medium.

        If several are equally long, a session that ends there is preferred to one that continues.
        """
        node, depth = self._root, 0
        while True:
            child = node.children.get(prompt[depth]) if depth < len(prompt) else None
            if child is None:
                break
            shared = common_prefix(child.tokens, prompt[depth : depth + len(child.tokens)])
            node, depth = child, depth + shared
            if shared < len(child.tokens):
                break
        shared = uncut(prompt, depth)
        return (self._any(node), shared) if shared else (None, 0)

    def put(self, session: S) -> None:
        """Index the shareable tokens of ``session`` as they are now, replacing its earlier entry."""
        self.remove(session)
        tokens = session.shareable
        if not tokens:
            return
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                child = node.children[tokens[depth]] = _Node(tokens[depth:], node)
                node = child
                break
            shared = common_prefix(child.tokens, tokens[depth : depth + len(child.tokens)])
            node = child if shared == len(child.tokens) else self._split(child, shared)
            depth += shared
        node.sessions[session] = None
        self._nodes[session] = node

    def remove(self, session: S) -> None:
        """Remove ``session`` from the index; no error if it is not there."""
        node = self._nodes.pop(session, None)
        if node is None:
            return
        del node.sessions[session]
        while node.parent is not None and not node.sessions and not node.children:
            del node.parent.children[node.tokens[0]]
            node = node.parent
        if node.parent is not None and not node.sessions and len(node.children) == 1:
            self._merge(node)

    def check_integrity(self) -> int:
        """Assert the invariant; returns how many sessions are indexed."""
        nodes, found = [self._root], 0
        for node in nodes:
            nodes.extend(node.children.values())
            found += len(node.sessions)
            assert node.parent is None or node.sessions or len(node.children) > 1
            assert all(self._nodes[session] is node for session in node.sessions)
            assert all(child.parent is node and child.tokens[0] == at for at, child in node.children.items())
        assert found == len(self._nodes)
        return found

    @staticmethod
    def _any(node: _Node[S]) -> S:
        while not node.sessions:
            node = next(iter(node.children.values()))
        return next(reversed(node.sessions))

    @staticmethod
    def _split(node: _Node[S], at: int) -> _Node[S]:
        """Cut the edge to ``node`` after ``at`` tokens; returns the new upper part."""
        assert node.parent is not None
        upper = _Node(node.tokens[:at], node.parent)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[node.tokens[0]] = node
        return upper

    @staticmethod
    def _merge(node: _Node[S]) -> None:
        """Merge ``node``, at which no session ends, with its only child."""
        (child,) = node.children.values()
        assert node.parent is not None
        child.tokens = node.tokens + child.tokens
        child.parent = node.parent
        node.parent.children[child.tokens[0]] = child


class PrefixIndexes(Generic[S]):
    """An index for each tenant and side of a RoPE threshold. Empty indexes are removed, as names of tenants with salts
    are unlimited in number.
    """

    def __init__(self) -> None:
        self._indexes: dict[tuple[str, bool], PrefixIndex[S]] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def match(self, tenant: str, long: bool, prompt: array[int]) -> tuple[S | None, int]:
        index = self._indexes.get((tenant, long))
        return index.match(prompt) if index is not None else (None, 0)

    def put(self, tenant: str, long: bool, session: S) -> None:
        if (tenant, long) not in self._indexes:
            self._indexes[tenant, long] = PrefixIndex()
        self._indexes[tenant, long].put(session)
        self._prune(tenant, long)

    def remove(self, tenant: str, long: bool, session: S) -> None:
        if (tenant, long) in self._indexes:
            self._indexes[tenant, long].remove(session)
            self._prune(tenant, long)

    def check_integrity(self) -> int:
        """See ``PrefixIndex.check_integrity``; also asserts that no index is empty."""
        assert all(self._indexes.values())
        return sum(index.check_integrity() for index in self._indexes.values())

    def _prune(self, tenant: str, long: bool) -> None:
        if not self._indexes[tenant, long]:
            del self._indexes[tenant, long]
