"""What requests ask of a model, and the refusal of a model that is for something else."""

from __future__ import annotations

from scheduler.model_task import Task
from server.errors import ApiError, bad_request
from server.models.offered_model import OfferedModel

Tasks = tuple[Task, ...]

MADE_FOR: dict[Task, str] = {
    "generate": "This model generates text: embeddings, scores and transcriptions need a model that was made for them.",
    "embed": "This model makes embeddings: it is for /v1/embeddings, and generates no text.",
    "score": "This model scores pairs of texts: it is for /v1/rerank and /v1/score.",
    "transcribe": "This model turns speech into text: it is for /v1/audio/transcriptions, and answers no text.",
}


def check_task(model: OfferedModel, tasks: Tasks) -> None:
    """Raises a 400 where it is known that a model is for none of these; empty: anything is right."""
    if tasks and model.task is not None and model.task not in tasks:
        raise wrong_task(model.task)


def wrong_task(task: Task) -> ApiError:
    """400: the model does not do what the request asks for."""
    return bad_request(MADE_FOR[task], "model", "wrong_model_task")
