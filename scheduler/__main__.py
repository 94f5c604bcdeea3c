"""The engine process: ``python -m scheduler`` with an ``EngineConfig`` as one line of JSON on standard input.

The configuration is read before torch is imported: it tells what of torch and transformers is not needed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import msgspec

from scheduler.imports import spare
from scheduler.messages import EngineConfig


def main() -> int:
    """Read the configuration, then load and serve; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server decides
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    spare(config)
    from scheduler import process

    return process.main(config)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is closed: taking the interpreter apart would cost a second
