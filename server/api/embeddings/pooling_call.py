"""``pool``: has an engine embed or score inputs for a request, and counts what that cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

from fastapi import Request

from server.api.embeddings.tokenising import Inputs
from server.http.error_responses import as_api_error
from server.http.sse import while_connected
from server.log.usage_rows import Spent
from server.telemetry import log_context, traces
from server.turns.context import ServerContext

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Vectors: TypeAlias = "npt.NDArray[np.float32]"  # [inputs, numbers]; numpy is imported with the first of them


async def pool(request: Request, context: ServerContext, operation: str, inputs: Inputs) -> Vectors:
    """The vectors of the inputs. ``operation`` is a name of the conventions for spans. Raises a 429 beyond the limits
    of the request's key, what the engine raises, and ClientLeft.
    """
    state = request.state
    state.rate_limit.admit()
    span = traces.pooling(context.tracer, operation, context.served_name, state.tenant)
    began, error = time.monotonic(), "cancelled"
    log_context.note(prompt_tokens=inputs.tokens, inputs=len(inputs.made))
    try:
        spare = getattr(state, "spare", False)
        answer = await while_connected(request.receive, context.engine.pool(state.tenant, inputs.made, spare))
        error = ""
    except Exception as failure:
        error = as_api_error(failure).body.error.code or type(failure).__name__
        raise
    finally:
        traces.end_span(span, {"gen_ai.usage.input_tokens": inputs.tokens}, error or None)
    seconds = time.monotonic() - began
    state.rate_limit.charge(inputs.tokens)
    context.log.usage.add(state.tenant, state.key, Spent(1, inputs.tokens, 0, 0, seconds))
    context.metrics.pooled(inputs.tokens, time.perf_counter() - state.started)
    import numpy as np  # 6 MB, for which most servers have no use

    return np.frombuffer(answer.vectors, "<f4").reshape(len(inputs.made), -1)
