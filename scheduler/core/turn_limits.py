"""``Limits``: checks of a turn's request against the context and the vocabulary."""

from __future__ import annotations

from array import array

from cache.media_ids import MEDIA
from scheduler.protocol import Refused, Submit


class Limits:
    """The limits on a turn: ``context`` tokens in all, token ids below ``vocab``, and ids below ``width`` where logits
    are needed.

    ``start`` are the first tokens of an encoder-decoder model's decoder: then prompt and reply have a context each.
    """

    def __init__(
        self, context: int, vocab: int, start: tuple[int, ...] = (), width: int | None = None, sees: bool = False
    ) -> None:
        """``sees``: prompts may have media ids."""
        self.sees = sees
        self.context = context
        self.vocab = vocab
        self.width = min(vocab, width or vocab)
        self.start = start

    def refuse(self, request: Submit, ids: array[int]) -> Refused | None:
        """Why a request with this prompt cannot be served; None where it can."""
        if any(not 0 <= token < self.width for token in request.sampling.logit_bias):
            return Refused(request.turn, "invalid_prompt", "logit_bias has a token id that is not in the vocabulary.")
        if any(not word or not 0 <= word[-1] < self.width for word in request.sampling.bad_words):
            return Refused(request.turn, "invalid_prompt", "bad_words has a token id that is not in the vocabulary.")
        if request.thinking is not None and any(not 0 <= t < self.width for t in request.thinking.token_ids):
            return Refused(request.turn, "invalid_prompt", "The end of its reasoning is not in the vocabulary.")
        if not ids:
            return Refused(request.turn, "invalid_prompt", "The prompt is empty.")
        if min(ids) < 0 or max(self._text(ids)) >= self.vocab:
            return Refused(request.turn, "invalid_prompt", "The prompt has a token id that is not in the vocabulary.")
        if request.prompt_logprobs is not None and max(ids) >= MEDIA:
            return Refused(request.turn, "invalid_prompt", "Prompts with pictures or sounds have no log-probabilities.")
        if request.prompt_logprobs is not None and max(ids) >= self.width:
            return Refused(request.turn, "invalid_prompt", "The prompt has a token id without a log-probability.")
        if self.start and request.state:
            return Refused(request.turn, "invalid_prompt", "Encoder-decoder models give no state of a session.")
        if self.start and request.prompt_logprobs is not None:
            return Refused(
                request.turn, "invalid_prompt", "Prompts of encoder-decoder models have no log-probabilities."
            )
        limit = request.stopping.max_tokens
        wanted = max(len(self.start or ids) + (1 if limit is None else limit), len(ids))
        if wanted > self.context:
            return Refused(
                request.turn,
                "context_length_exceeded",
                f"The context is {self.context} tokens; {wanted} were asked for.",
            )
        return None

    def _text(self, ids: array[int]) -> array[int]:
        """The ids that must be in the vocabulary."""
        if not self.sees or max(ids) < MEDIA:
            return ids
        return array("i", [0, *(token for token in ids if token < MEDIA)])
