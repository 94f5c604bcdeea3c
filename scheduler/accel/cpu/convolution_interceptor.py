"""``ConvolutionWatch``: while a module is recorded, a short causal convolution along tokens, which goes on from a
session's state, is recorded as one call between two blocks.

The code around such a convolution differs: it pads, cuts off and turns round. So what it makes of the state is not
looked at, but what comes out must be the numbers that the convolution gives for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from scheduler.accel.cpu.convolution_program import ConvolutionRequest
from scheduler.accel.cpu.linear import equal
from scheduler.accel.cpu.recorder import Recorder, Unrecordable

_CONVOLUTION = torch.ops.aten.convolution
_ROUNDINGS = 2  # of the sum, and with the bias
# What modules do with a cache object.
_STATE = (
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
    *("update", "get_seq_length"),
)


class ConvolutionWatch:
    """What one module stores in the state of a convolution, and what is computed of it."""

    def __init__(self, recorder: Recorder, state: Any, asked: list[Any]) -> None:
        self._recorder, self._asked = recorder, asked
        self._get, self._update = state.get_conv_state, state.update_conv_state
        self._input: torch.Tensor | None = None  # [1, C, T]
        self._inputs: torch.Tensor | None = None  # with those that the state had: [1, C, T or more]
        self._layer = -1
        self._kernel: tuple[torch.Tensor, torch.Tensor | None] | None = None  # weight [C, 1, K], bias

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the method of the cache."""
        return self._unseen(self._get, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Stands for the method of the cache."""
        if self._input is not None or self._asked:
            raise Unrecordable("more than one convolution or attention")
        with self._recorder.paused():
            self._inputs = self._update(conv_states, layer_idx, *args, **kwargs).clone()
            self._recorder.let_idle(self._inputs)
        self._input, self._layer = conv_states, layer_idx
        return self._inputs

    @property
    def done(self) -> bool:
        """Whether what was stored, if anything was, is that of a recorded convolution."""
        return self._input is None or bool(self._asked)

    def see(self, name: Any, args: Any) -> None:
        """A function of what nobody looks at was called."""
        if name is _CONVOLUTION and args[0] is self._inputs:
            weight, bias, stride, groups = args[1], args[2], args[3], args[8]
            if weight.dim() == 3 and weight.shape[1] == 1 and groups == len(weight) and list(stride) == [1]:
                self._kernel = weight, bias

    def resolve(self, tensor: torch.Tensor) -> bool:
        """Record ``tensor`` if it is the result of the convolution; whether it is."""
        if self._kernel is None or self._input is None or self._inputs is None or self._asked:
            return False
        if tensor.dtype is not self._input.dtype:  # rows before and after it are of one type
            return False
        weight, bias = self._kernel
        if not equal(tensor, self._convolved().to(tensor.dtype), _ROUNDINGS):
            return False
        request = ConvolutionRequest(self._layer, weight[:, 0], bias, [self._input], tensor)
        self._recorder.attend([self._input], tensor)
        self._asked.append(request)
        return True

    def _unseen(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a method of the cache returns. It is not recorded, and nothing may depend on what it is."""
        with self._recorder.paused():
            found = method(*args, **kwargs)
        if found is not None:
            self._recorder.let_idle(found)
        return found

    def _convolved(self) -> torch.Tensor:
        """The result of the convolution in float32, ``[1, C, T]``."""
        assert self._kernel is not None
        assert self._input is not None
        assert self._inputs is not None
        weight, bias = self._kernel
        padded = F.pad(self._inputs.float(), (weight.shape[2] - 1, 0))
        out = F.conv1d(padded, weight.float(), None if bias is None else bias.float(), groups=len(weight))
        return out[..., -self._input.shape[-1] :]


@contextmanager
def intercept_state(recorder: Recorder, state: Any, watch: ConvolutionWatch) -> Iterator[None]:
    """Within it, what is done with the cache object of a session is what ``watch`` knows. Other uses of it raise
    Unrecordable, and what was stored that nothing recorded has made.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Unrecordable("it has another state than that of what is recorded")

    own = {name: getattr(watch, name, refuse) for name in _STATE if hasattr(state, name)}
    vars(state).update(own)
    recorder.idle_watch = watch
    try:
        yield
        if not watch.done:
            raise Unrecordable("it stores what is in no convolution")
    finally:
        recorder.idle_watch = None
        for name in own:
            del vars(state)[name]
