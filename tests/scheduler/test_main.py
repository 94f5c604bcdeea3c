"""The engine process sets what its configuration means for the libraries that it imports later."""

import os

import pytest

from scheduler.__main__ import set_environment
from scheduler.engine_config import EngineConfig


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("cuda", "3"), ("auto", "3")])
def test_an_engine_on_the_cpu_sees_no_other_device(device: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    set_environment(EngineConfig(address="", model="m", device=device))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(("offline", "mode"), [(True, "1"), (False, "0")])
def test_an_engine_whose_server_cannot_reach_the_hub_is_offline(
    offline: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    set_environment(EngineConfig(address="", model="m", offline=offline))
    assert os.environ["HF_HUB_OFFLINE"] == mode
