"""Checks whether the Hugging Face hub can be reached before a model is loaded from it; if not, sets offline mode."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from server.telemetry.log_context import say

CONNECT_SECONDS = 4.0
OFFLINE = "HF_HUB_OFFLINE"


def look_for(model: str) -> None:
    """If ``model`` is a hub id and the hub cannot be reached, set offline mode for this process and the engine, so that
    files downloaded earlier are used at once. Does nothing behind a proxy, or if offline mode is set already.
    """
    proxied = any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ)
    missing = model.endswith(".gguf") and model.count("/") != 2  # a file: on the hub it is OWNER/REPOSITORY/FILE
    if missing or Path(model).exists() or OFFLINE in os.environ or proxied:
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    say(f"looking for {model} at {endpoint}; what has to be downloaded is kept for the next time")
    if not reachable(endpoint):
        say(f"{endpoint} cannot be reached: taking what was downloaded before")
        os.environ[OFFLINE] = "1"


def is_offline() -> bool:
    return os.environ.get(OFFLINE) == "1"


def reachable(endpoint: str) -> bool:
    """Whether a TCP connection to ``endpoint`` succeeds within ``CONNECT_SECONDS``, name lookup included."""
    url = urlsplit(endpoint)
    connected = threading.Event()

    def connect() -> None:
        try:
            port = url.port or (80 if url.scheme == "http" else 443)
            socket.create_connection((url.hostname or "", port), CONNECT_SECONDS).close()
            connected.set()
        except (OSError, ValueError):
            pass

    trying = threading.Thread(target=connect, daemon=True)  # a name may take longer to look up than we wait
    trying.start()
    trying.join(CONNECT_SECONDS)
    return connected.is_set()
