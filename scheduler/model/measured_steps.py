"""The steps of three sessions by which a mode is measured."""

from __future__ import annotations

from collections.abc import Iterator

LENGTHS = (22, 42, 18)  # of the sessions
LONGEST = 1  # which of them
HEAD = 10  # tokens that are run on their own, to see whether later ones change them
RECORDED = (7, 5, 11, 13, 17, 19, 23)  # tokens of steps that are recorded: the first that the model has no size of
OBSERVED = (3, 2, 5)  # of those in which it is only seen which module is called after which
CHECKED = (5, 1, 2)  # of those that are compared with what is known; of the last one only the last token
SOURCES = (9, 14, 9)  # what the encoder reads, if there is one
STEPS = (  # (session, tokens) fed together, in shuffled order
    ((0, 5),),
    ((0, 1), (1, 17)),
    ((1, 13), (0, 1), (2, 11)),
    *(((2, 1), (0, 1), (1, 1)),) * 4,
    ((0, 8), (1, 5), (2, 1)),
    *(((0, 1), (2, 1), (1, 1)),) * 2,
    ((1, 1),),
)
_ENDS = 7  # the step of which only the last tokens' logits are asked for, as in serving


def rows_of(number: int) -> Iterator[range]:
    """The rows of a step whose logits are asked for, of each of its sessions."""
    end = 0
    for _, count in STEPS[number]:
        end += count
        yield range(end - 1 if number == _ENDS else end - count, end)


def asked() -> list[list[int]]:
    """For each session the tokens whose logits are asked for."""
    fed, found = [0] * len(LENGTHS), list[list[int]]([] for _ in LENGTHS)
    for number, work in enumerate(STEPS):
        for (session, count), rows in zip(work, rows_of(number), strict=True):
            fed[session] += count
            found[session] += range(fed[session] - len(rows), fed[session])
    return found
