"""``AdapterSet``: the adapters of a model, by their names, and the modules that they add to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.pages.packed import PackedStep
from scheduler.accel.cpu.matrix import TYPES
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.adapters.adapted_rows import AdaptedRows
from scheduler.adapters.adapter import Adapter, AdapterUse, Changes
from scheduler.adapters.adapter_checkpoint import AdapterCheckpoint, BadAdapter, LowRankPair, read_adapter
from scheduler.adapters.adapter_tables import AdapterTables
from scheduler.adapters.fitter import Fitter


class AdapterSet:
    """The adapters that turns may name. A turn keeps the one with which it has begun, whatever is loaded under that
    name, or unloaded, while it runs.

    A module that some adapter adds to gets a forward of ours, which leaves steps without adapters as they were. Where
    programs compute a module, they add what is to be added.
    """

    def __init__(
        self,
        model: Any,
        decoder: torch.nn.Module,
        packing: Packing | None,
        refusal: str = "",
        late: AbstractSet[torch.nn.Module] = frozenset(),
    ) -> None:
        """``decoder``: the part of the model that runs in steps. ``refusal``: why this model takes no adapters.
        ``late``: see ``Trace``.
        """
        self._by_name: dict[str, Adapter] = {}
        self._model, self._refusal, self._late = model, refusal, late
        self._head: torch.nn.Module | None = model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        inside = [*decoder.modules(), *([] if self._head is None else [self._head])]
        self._modules: dict[str, torch.nn.Module] = {names[module]: module for module in inside}
        self._packing = packing
        ours = kernel() if packing is not None and model.device.type == "cpu" else None
        self._tables = AdapterTables(packing, ours) if packing is not None and ours is not None else None
        self._before: dict[torch.nn.Module, Any] = {}  # forwards that were replaced, None: of the class
        self._rows: AdaptedRows | None = None  # of the step that runs

    def find(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_name.values())

    def load(self, name: str, folder: Path) -> Adapter:
        """Load the adapter in a folder under a name, in place of another one of that name. Raises ``BadAdapter``."""
        if self._refusal:
            raise BadAdapter(self._refusal)
        found = read_adapter(folder)
        changes = self._fit(found)
        adapter = Adapter(name, found.digest, changes, found.invocation, self._late >= {*changes.modules})
        for module in adapter.changes.modules:
            self._wrap(module)
        self._by_name[name] = adapter
        return adapter

    def unload(self, name: str) -> bool:
        """Forget an adapter; turns that run with it go on. False if there is none of that name."""
        return self._by_name.pop(name, None) is not None

    def remove(self) -> None:
        """Forget all adapters, and leave the model as it was."""
        self._by_name.clear()
        while self._before:
            module, forward = self._before.popitem()
            del module.forward
            if forward is not None:
                module.forward = forward

    @contextmanager
    def over(self, step: PackedStep, keep: Sequence[int]) -> Iterator[bool]:
        """Within it ``step`` runs with the adapters of its sessions; ``keep``: the rows whose logits are wanted.
        Gives whether programs may compute it.
        """
        uses = [(span, span.session.key) for span in step.spans if isinstance(span.session.key, AdapterUse)]
        adapters = list(dict.fromkeys(use.adapter for _, use in uses))
        owners = np.full(step.tokens, -1, np.int64)
        for span, use in uses:
            owners[span.row + min(span.size, max(0, use.active - span.start)) : span.row + span.size] = adapters.index(
                use.adapter
            )
        kept = np.array(keep, np.int64)
        step.adapted = self._rows = AdaptedRows(adapters, owners, kept, self._tables, self._model.device)
        try:
            with self._rows.running():
                yield all(adapter.only_adds for adapter in adapters)
        finally:
            self._rows = None

    def _fit(self, found: AdapterCheckpoint) -> Changes:
        """What a checkpoint changes at this model. Raises ``BadAdapter``."""
        changes = Changes()
        for asked, pair in found.pairs.items():
            module = self._module(asked)
            self._check(asked, module, pair)
            if module in changes.pairs:
                raise BadAdapter(f"two LoRAs are for one module: {asked[:200]}")
            changes.pairs[module] = LowRankPair(self._store(pair.down), self._store(pair.up), pair.scale)
        fitter = Fitter(self._model, changes, self._shape, self._store)
        for asked, magnitude in found.magnitudes.items():
            fitter.rescale(asked, self._module(asked), magnitude)
        for asked, bias in found.biases.items():
            fitter.replace_bias(asked, self._module(asked), bias)
        for asked, bias in found.added.items():
            fitter.add_bias(asked, self._module(asked), bias)
        for asked, weights in found.saved.items():
            fitter.replace(asked, self._module(asked), weights)
        return changes

    def _module(self, asked: str) -> torch.nn.Module:
        """The module of a name in a checkpoint: of exactly that name, or the only one whose name ends as that does,
        since transformers has changed what stands in front. Raises ``BadAdapter``.
        """
        if asked in self._modules:
            return self._modules[asked]
        parts = asked.split(".")
        for first in range(1, len(parts) - 1):
            end = ".".join(["", *parts[first:]])
            found = [module for name, module in self._modules.items() if name.endswith(end)]
            if len(found) == 1:
                return found[0]
            if found:
                break
        raise BadAdapter(f"the model has no such module that an adapter may add to: {asked[:200]}")

    def _check(self, asked: str, module: torch.nn.Module, pair: LowRankPair) -> None:
        """Raises ``BadAdapter`` where a pair does not fit its module."""
        shape = self._shape(module)
        if shape is None:
            raise BadAdapter(f"this is no linear map: {asked[:200]}")
        if (pair.up.shape[0], pair.down.shape[1]) != shape:
            raise BadAdapter(
                f"the LoRA of {asked[:200]} is for a map from {pair.down.shape[1]} to {pair.up.shape[0]}, and the "
                f"model's is from {shape[1]} to {shape[0]}: the adapter is of another model"
            )

    def _shape(self, module: torch.nn.Module) -> tuple[int, int] | None:
        """``(out, in)`` of a linear map; None for any other module."""
        if self._packing is not None and (found := self._packing.matrix(module)) is not None:
            return found[0].out, found[0].inside
        if isinstance(module, torch.nn.Linear):
            return module.out_features, module.in_features
        weight = module._parameters.get("weight")
        if hasattr(module, "nf") and weight is not None and weight.dim() == 2:  # its weight is [in, out]
            return weight.shape[1], weight.shape[0]
        return None

    def _store(self, tensor: torch.Tensor) -> torch.Tensor:
        """A half of a pair on the model's device, in the model's precision or as it was saved, whichever is less."""
        wanted = self._model.dtype
        least = tensor.dtype if tensor.dtype in TYPES and tensor.dtype.itemsize <= wanted.itemsize else wanted
        return tensor.to(self._model.device, least).contiguous()

    def _wrap(self, module: torch.nn.Module) -> None:
        if module not in self._before:
            self._before[module] = vars(module).get("forward")
            module.forward = partial(self._forward, module, module.forward)

    def _forward(self, module: torch.nn.Module, own: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Replaces the forward of a linear map."""
        out = own(x)
        if self._rows is None:
            return out
        given = x.reshape(-1, x.shape[-1]) if x.is_floating_point() else x.reshape(-1)  # token ids
        made = out.reshape(-1, out.shape[-1])
        for adapter, rows in self._rows.groups(len(given), module is self._head):
            adapter.change(module, rows, given, made)
        return made.view(out.shape)
