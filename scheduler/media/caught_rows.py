"""The rows of a medium, of a model that has no method that makes them: they are seen where its decoder begins, in place
of what tokens are embedded as.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch


class NotCaught(Exception):
    """No rows were seen; the message says why."""


@torch.inference_mode()
def caught_rows(model: Any, decoder: Any, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """The rows ``[n, width]`` that a forward of ``model`` with the arguments ``given`` has in place of what it embeds
    some of ``ids [1, T]`` as. ``decoder``: what takes ``inputs_embeds``; if it is given none, as it embeds tokens
    itself, they are looked for where its layers begin. Nothing behind that is computed. Raises NotCaught, and what the
    model does.
    """
    with ExitStack() as hooks:
        for module, name in ((decoder, "inputs_embeds"), (_first_layer(decoder), "hidden_states")):
            if module is not None:
                hooks.callback(module.register_forward_pre_hook(_Catch(name), with_kwargs=True).remove)
        try:
            model(input_ids=ids, use_cache=False, return_dict=True, **given)
        except _Caught as caught:
            embedded = caught.embedded
        else:
            raise NotCaught("its decoder is not run")
    own = model.get_input_embeddings()(ids)
    if embedded.shape != own.shape:
        raise NotCaught("what its encoder makes does not stand in place of tokens")
    others = (embedded != own).any(-1)[0]
    if not others.any():
        raise NotCaught("what its encoder makes does not enter where its layers begin")
    return embedded[0][others].clone()


class _Caught(BaseException):
    """What a decoder was given; no code that handles errors stops it."""

    def __init__(self, embedded: torch.Tensor) -> None:
        super().__init__()
        self.embedded = embedded


class _Catch:
    """A hook that stops at a module that gets a tensor as this argument, which is its first if it has no name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found = kwargs.get(self._name, args[0] if args else None)
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            raise _Caught(found)


def _first_layer(decoder: Any) -> Any:
    """The module that is run first of those that are in a row in the decoder; None: there is none."""
    inside = decoder.get_decoder() if hasattr(decoder, "get_decoder") else decoder
    lists = (one for one in inside.children() if isinstance(one, torch.nn.ModuleList)) if inside is not None else ()
    return next((layers[0] for layers in lists if len(layers)), None)
