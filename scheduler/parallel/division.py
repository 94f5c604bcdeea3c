"""Dividing a model among ranks, one process each: which models can be divided, how a rank joins the process group, and
the options for loading.

transformers divides the model, by the plan that it has for its architecture.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from scheduler import cores

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(hours=2)  # ranks that load are minutes apart; that one hangs is noticed elsewhere


class RankAddress(NamedTuple):
    """Which rank of how many this process is, and the port where they meet."""

    rank: int
    ranks: int
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """What libraries look at."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self.port),
            "NCCL_GRAPH_MIXING_SUPPORT": "0",
        }


def obstacle(settings: Any, ranks: int, device: torch.device) -> str | None:
    """Why a model of this config cannot be divided among so many ranks, as far as that can be seen before loading."""
    text = settings.get_text_config(decoder=True)
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        return f"{ranks} CUDA devices are needed, and {torch.cuda.device_count()} are here"
    if settings.is_encoder_decoder:
        return "an encoder-decoder model cannot be divided"
    if any(hasattr(part, "quantization_config") for part in (settings, text)):
        return "quantised weights cannot be divided"
    if not text.base_model_tp_plan:
        return "transformers has no plan for dividing its layers"
    heads = getattr(text, "num_attention_heads", None)
    for what, count in (("attention", heads), ("key", getattr(text, "num_key_value_heads", None) or heads)):
        if isinstance(count, int) and count % ranks:
            return f"its {count} {what} heads cannot be divided by {ranks}"
    return None


def open_store(ranks: int) -> tuple[TCPStore, int]:
    """Where ranks meet: rank 0's store, and the port that it listens on, of this machine alone."""
    listener = socket.socket()
    listener.bind((_HOST, 0))
    listener.listen()
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store's from now on
    store = TCPStore(_HOST, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return store, port


def join(address: RankAddress, device: torch.device, store: TCPStore | None = None) -> None:
    """Meet the other ranks; returns when all are there. ``store`` is rank 0's."""
    os.environ.update(address.environment)
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # all ranks are on this machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    cores.share(address.ranks)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    store = store or TCPStore(_HOST, address.port, address.ranks, is_master=False)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=address.rank,
        world_size=address.ranks,
        timeout=_TIMEOUT,
        device_id=device if cuda else None,
    )


def options(ranks: int) -> dict[str, Any]:
    """What ``from_pretrained`` must be told, once the ranks have met."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def whole(weight: Any) -> Any:
    """A weight as it was before it was divided. Every rank must ask for the same ones, in the same order."""
    return weight.full_tensor() if cores.is_divided(weight) else weight
