"""LangChain's standard tests for chat models, through OpenAI's API and through Anthropic's."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from conftest import KEY
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from server_process import ServerProcess

READS = "the demo model does not understand what is asked: it calls the tool with another number"
CHOOSES = "the demo model does not call tools unless it is made to"
SPELLS = "the demo model does not write what it was asked to, only what fits the schema"
STOPS = "without a bias, which Anthropic's API has not, the demo model never ends a string or a series of calls"


class TestOverOpenAI(ChatModelIntegrationTests):
    NEEDS: ClassVar[dict[str, str]] = {
        "test_tool_calling": READS,
        "test_tool_calling_async": READS,
        "test_bind_runnables_as_tools": SPELLS,
        "test_json_mode": "JSON mode promises an object, and the demo model writes an empty one",
        "test_agent_loop": CHOOSES,
        "test_unicode_tool_call_integration": SPELLS,
    }
    url: ClassVar[str]
    bias: ClassVar[dict[str, int]]

    @pytest.fixture(autouse=True)
    def _served(self, server: ServerProcess, terse: dict[str, int]) -> None:
        type(self).url, type(self).bias = server.url, terse

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "m",
            "base_url": f"{self.url}/v1",
            "api_key": KEY,
            "temperature": 0,
            "stream_usage": True,
            "logit_bias": self.bias,
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestOverAnthropic(ChatModelIntegrationTests):
    NEEDS: ClassVar[dict[str, str]] = {
        "test_tool_calling": READS,
        "test_tool_calling_async": READS,
        "test_tool_calling_with_no_arguments": STOPS,
        "test_bind_runnables_as_tools": SPELLS,
        "test_structured_output[pydantic]": STOPS,
        "test_structured_output_async[pydantic]": STOPS,
        "test_structured_output_pydantic_2_v1": STOPS,
        "test_structured_output_optional_param": STOPS,
        "test_agent_loop": CHOOSES,
        "test_unicode_tool_call_integration": SPELLS,
    }
    url: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _served(self, server: ServerProcess) -> None:
        type(self).url = server.url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": self.url, "api_key": KEY, "max_tokens": 400, "temperature": 0}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
