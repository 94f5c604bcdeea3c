"""Real clients against a real server with the demo model, in an environment of their own: `make test-clients`.

A test that only a clever model passes is named in ``NEEDS`` of its class, with the reason why it is expected to fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from server_process import ServerProcess

KEY = "a-key"
ENDS = {'"': 14, "}": 10}  # the demo model, made to write JSON, would never end a string of its own accord
os.environ |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # read when they are imported
collect_ignore_glob = [] if find_spec("langchain_tests") else ["test_*.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Started by the Python that the server is installed for: ``SERVER_PYTHON``."""
    with ServerProcess(None, tmp_path_factory.mktemp("data"), "--api-key", f"ann={KEY}") as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is expected to fail, by the name of the test with its parameters or without."""
    for item in items:
        needs: dict[str, str] = getattr(getattr(item, "cls", None), "NEEDS", {})
        reason = needs.get(item.name) or needs.get(item.name.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture(scope="session")
def terse(server: ServerProcess) -> dict[str, int]:
    """A ``logit_bias`` under which JSON comes to its end."""
    ids = {}
    for text, bias in ENDS.items():
        answer = server.post("/tokenize", {"prompt": text}, **{"x-api-key": KEY}).json()
        ids[str(answer["tokens"][0])] = bias
    return ids
