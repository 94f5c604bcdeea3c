"""The entry point of the engine process: ``python -m scheduler`` reads an ``EngineConfig`` as one line of JSON from
standard input.

The configuration is read after torch is imported and before transformers is: it decides which parts of transformers are
imported.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys

import msgspec

from scheduler.import_savings import import_torch, spare
from scheduler.protocol import EngineConfig


def main() -> int:
    """Read the configuration, then load the model and serve. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server decides
    gc.disable()  # what is imported stays
    import_torch()
    line = sys.stdin.buffer.readline()
    if not line:  # the server is gone before it has configured an engine
        return 0
    config = msgspec.json.decode(line, type=EngineConfig)
    spare(config)
    from scheduler import process

    gc.freeze()
    gc.enable()
    return process.main(config)


def run() -> None:
    """Run the engine and end the process with its status, 1 if it failed. It ends without waiting for threads, since
    one of them may wait for another rank forever.
    """
    try:
        status = main()
    except Exception:
        logging.getLogger("warmturn.engine").exception("the engine cannot go on")
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
