"""Replies as a terminal shows them."""

import io

from rich.console import Console

from server.cli.chat.reply_view import MarkdownView, split_last_block, visible
from server.cli.chat.streamed_turn import ReplyPiece

REPLY = "# Title\n\nSome *text*\nin lines.\n\n```python\nx = 1\n\ny = 2\n```\n\n- one\n- two\n"


def shown(*pieces: ReplyPiece, height: int = 24) -> str:
    """What is left on the screen, without styles."""
    console = Console(file=io.StringIO(), force_terminal=False, width=40, height=height)
    with MarkdownView(console).replying() as reply:
        for piece in pieces:
            reply.add(piece)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_reply_in_any_pieces_is_shown_once_and_whole() -> None:
    whole = shown(ReplyPiece(REPLY))
    words = ["Title", "Some text in lines.", "x = 1", "y = 2", "one", "two"]
    assert [whole.count(word) for word in words] == [1] * len(words)
    assert shown(*map(ReplyPiece, REPLY)).split() == whole.split()


def test_only_the_last_block_is_drawn_anew() -> None:
    done, tail = split_last_block("para\n\n```\nx\n\ny")
    assert (done, tail) == ("para\n\n", "```\nx\n\ny")
    assert split_last_block("only one\nparagraph") == ("", "only one\nparagraph")
    assert split_last_block("") == ("", "")


def test_reasoning_comes_before_the_answer() -> None:
    text = shown(ReplyPiece("Let me ", True), ReplyPiece("think.", True), ReplyPiece("Yes."))
    assert text.split() == ["Let", "me", "think.", "Yes."]
    assert text.index("think.") < text.index("\n") < text.index("Yes.")


def test_what_a_terminal_would_obey_is_not_sent_to_it() -> None:
    assert (
        visible("a\x1b[2Jb\x07\x9bc\td\n")
        == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}c\td\n"
    )
    assert "\x1b" not in shown(ReplyPiece("a\x1b]0;title\x07"), ReplyPiece("\x1b[31m", True))
