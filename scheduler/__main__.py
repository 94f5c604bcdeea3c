"""The entry point of the engine process: ``python -m scheduler`` reads an ``EngineConfig`` as one line of JSON from
standard input, imports what it needs for it, and loads the model after a second line, which is empty.

The configuration is read after torch is imported and before transformers is: it decides which parts of transformers are
imported. It may be read long before the model may be loaded: meanwhile the server opens its log.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys

import msgspec

from scheduler.engine_config import EngineConfig
from scheduler.engine_import_savings import callers_found_quickly, import_torch, leave_out_unused
from scheduler.logs import JSON, NO_PROGRESS_BARS
from scheduler.read_ahead import read_ahead


def main() -> int:
    """Read the configuration, then load the model and serve. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server decides
    gc.disable()  # what is imported stays
    import_torch()
    line = sys.stdin.buffer.readline()
    if not line:  # the server is gone before it has configured an engine
        return 0
    config = msgspec.json.decode(line, type=EngineConfig)
    set_environment(config)
    read_ahead(config.model, config.packed_space)
    leave_out_unused(config)
    with callers_found_quickly():
        from scheduler import process

    gc.freeze()
    gc.enable()
    if not sys.stdin.buffer.readline():  # the same
        return 0
    return process.main(config)


def set_environment(config: EngineConfig) -> None:
    """Set what libraries read from the environment when they are imported or first used; ranks inherit it."""
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers divides a model for the best device that it sees
    if config.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if config.log_format == JSON:
        os.environ.setdefault(NO_PROGRESS_BARS, "1")


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
