"""``RankLink``: messages and tensors between two ranks on one machine, over a socket pair."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import torch

_SIZE = struct.Struct("<Q")


class RankLink:
    """Messages and tensors over one end of a socket pair. EOFError where the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, data: bytes) -> None:
        self._push(_SIZE.pack(len(data)) + data)

    def receive(self) -> bytes:
        """The next message."""
        size = bytearray(_SIZE.size)
        self._fill(memoryview(size))
        data = bytearray(_SIZE.unpack(size)[0])
        self._fill(memoryview(data))
        return bytes(data)

    def send_tensor(self, tensor: torch.Tensor) -> None:
        """The bytes of a CPU tensor, of which the other end knows the shape."""
        self._push(_bytes_of(tensor.contiguous()))

    def receive_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill ``tensor``, of any shape and dtype, contiguous and on the CPU."""
        self._fill(_bytes_of(tensor))
        return tensor

    def close(self) -> None:
        """The end of the line, for both ends and for whoever is reading."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _push(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise EOFError from error

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                got = self._socket.recv_into(view)
            except OSError as error:
                raise EOFError from error
            if not got:
                raise EOFError
            view = view[got:]


def line_pair() -> tuple[RankLink, socket.socket]:
    """Our end of a line, and the other one for the process that is to have it."""
    ours, other = socket.socketpair()
    return RankLink(ours), other


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
