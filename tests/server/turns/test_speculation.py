"""What the engine drafts: asked for by requests, told in usage and receipt."""

from __future__ import annotations

from http_context import Site, events, served

from scheduler.protocol import unpack_ids


@served()
async def test_a_prediction_reaches_the_engine_and_usage_tells_what_became_of_it(site: Site) -> None:
    site.engine.drafts = {"prediction": (9, 4), "history": (3, 3)}
    prediction = {"type": "content", "content": [{"type": "text", "text": "Hello there"}]}
    answer = (await site.chat(prediction=prediction)).json()
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 5)
    assert answer["cache"]["speculation"]["history"] == {"drafted": 3, "accepted": 3}
    assert details["speculation"] == answer["cache"]["speculation"]
    (submitted,) = site.engine.submitted
    assert site.engine._tokens.decode(list(unpack_ids(submitted.prediction))) == "Hello there"
    assert submitted.speculate


@served()
async def test_choices_are_added_up_and_a_stream_tells_it_too(site: Site) -> None:
    site.engine.drafts = {"prediction": (9, 4)}
    response = await site.chat(n=2, stream=True, stream_options={"include_usage": True})
    details = events(response.text)[-2]["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (8, 10)


@served()
async def test_a_request_may_do_without(site: Site) -> None:
    answer = await site.chat(speculation=False)
    assert "speculation" not in answer.json()["cache"]
    assert "speculation" not in answer.json()["usage"]["completion_tokens_details"]
    assert (await site.complete(speculation=False)).status_code == 200
    assert [submitted.speculate for submitted in site.engine.submitted] == [False, False]
    assert (await site.chat(speculation="no")).json()["error"]["param"] == "speculation"
