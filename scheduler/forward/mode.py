"""``Mode``: a way to run a step through a model's own modeling code."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from cache.pages.layers import AttentionLayer, Windows
from cache.pages.packed import PackedStep
from cache.pages.state_rows import StateRows
from scheduler.accel.cpu.fusion import Fusion, KnownPrograms, Steps
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.gpu.compiled import CompiledLayers
from scheduler.forward.trace import Trace


class Mode(ABC):
    """A way to run one step through unmodified modeling code.

    ``stateful``: sessions keep a state besides their pages. ``token_by_token``: a session that has a state is fed one
    token at a time; the probe sets it for models whose multi-token code ignores the state.
    """

    name: ClassVar[str]
    caches: ClassVar[bool] = True  # what was fed need not be fed again
    compiles: ClassVar[bool] = False  # its attention is one function that a compiler need not look into
    stateful: bool
    token_by_token = False

    def __init__(self, model: Any, layers: list[AttentionLayer], trace: Trace) -> None:
        self.model = model
        self.layers = layers
        self.trace = trace
        self.in_place: frozenset[int] = frozenset()
        # Layers whose keys and values are stored as one row, and whether they attend to rows in a step.
        self.joined: dict[int, Callable[[PackedStep], bool]] = {}
        self.fusion: Fusion | None = None
        self.compiled: CompiledLayers | None = None
        self.accepts = inspect.signature(model.forward).parameters
        self.rows = StateRows()
        self._open = any(p.kind is p.VAR_KEYWORD for p in self.accepts.values())

    @property
    def batches(self) -> bool:
        """Whether sessions that feed one token each, and their states, are computed as one batch, see ``rows``."""
        return False

    @property
    def graphed(self) -> Mode | None:
        """The mode in which decode steps can be CUDA graphs, whose states and pages are those of this one; None if they
        cannot.
        """
        return None

    @abstractmethod
    def install(self) -> None:
        """Prepare the model; raises ``Unsupported`` where it refuses."""

    @abstractmethod
    def remove(self) -> None:
        """Leave the model as it was."""

    @abstractmethod
    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        """Feed the step; returns the logits ``[len(keep), V]`` of the rows ``keep`` (indices into the packed row)."""

    @property
    def windows(self) -> Windows | None:
        """The windowed layers, if a step reads nothing of them behind what they see; known after a step."""
        return None

    @property
    def reads_in_place(self) -> bool:
        """Whether all layers that keep keys and values in pages read them there."""
        return False

    def learn(self) -> bool:
        """Called after a step with correct results: enable the optimisations that it has shown to be safe. Returns
        whether the mode has any.
        """
        return False

    def absorb(self, steps: Callable[[], Iterator[None]], rounding: float = 0.0) -> int:
        """Let layers attend in the space of their latents where possible. ``steps`` runs steps; ``rounding``: how
        products round their inputs, relative. Returns how many.
        """
        return 0

    def expand(self) -> None:
        """Let all layers attend to the keys that they make again."""
        self.joined = {}

    def fuse(self, packing: Packing, steps: Steps, known: KnownPrograms | None = None) -> int:
        """Run modules as programs where possible. ``steps`` runs so many steps of different lengths, one per
        iteration, with ``True`` of lengths that are no size of the model. ``known``: the programs of an earlier
        load, which has compared them with their modules. Returns the number of modules. Raises ``Unrecordable``.
        """
        return 0

    @property
    def programs(self) -> KnownPrograms:
        """What the next load needs of the programs."""
        return KnownPrograms() if self.fusion is None else self.fusion.programs

    def unfuse(self) -> None:
        """Run everything as it is again."""
        if self.fusion is not None:
            self.fusion.remove()
        self.fusion = None

    def compile(self, backend: Any, steps: Callable[[], Any]) -> int:
        """Compile layers where possible. ``steps`` runs steps of all kinds. Returns the number of modules."""
        return 0

    def uncompile(self) -> None:
        """Run everything as it is again."""
        if self.compiled is not None:
            self.compiled.remove()
        self.compiled = None

    @contextmanager
    def uncompiled(self, *, programs: bool = True) -> Iterator[None]:
        """Within it what is compiled runs as it is; without ``programs`` also what runs as programs."""
        with ExitStack() as stack:
            if self.compiled is not None:
                stack.enter_context(self.compiled.aside())
            if self.fusion is not None and not programs:
                stack.enter_context(self.fusion.aside())
            yield

    def positions(self, step: PackedStep) -> dict[str, Any]:
        """The explicit positions of the step's tokens, where the model takes them."""
        if not self.positions_accepted:
            return {}
        first = self.trace.first_position
        return {"position_ids": step.positions + first if first else step.positions}

    @property
    def positions_accepted(self) -> bool:
        """Whether positions can be told."""
        return "position_ids" in self.accepts or self._open


@contextmanager
def installed(mode: Mode) -> Iterator[Mode]:
    """``mode`` installed within the block, removed again if the block raises."""
    try:
        mode.install()
        yield mode
    except BaseException:
        mode.remove()
        raise
