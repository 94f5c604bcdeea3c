"""Tools that items add: at the front before the conversation has begun, later in place."""

from __future__ import annotations

from typing import Any

from http_context import Site, served
from openai_document import faults
from responses_kit import respond, says


def item(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LATE = {"type": "namespace", "name": "mail", "description": "", "tools": [{"type": "function", "name": "send"}]}
DEVELOPER = {"role": "developer", "content": "Be kind."}


@served()
async def test_tools_that_are_there_from_the_beginning_are_at_the_front(site: Site) -> None:
    await respond(site, input=[DEVELOPER, user("Hi")], tools=[FUNCTION], store=False)
    plain = site.prompt()
    await respond(site, input=[item(FUNCTION), DEVELOPER, user("Hi")], store=False)
    assert site.prompt() == plain
    await respond(site, input=[DEVELOPER, item(FUNCTION), user("Hi")], store=False)
    assert site.prompt() == plain


@served()
async def test_a_stored_response_keeps_the_tools_of_its_front(site: Site) -> None:
    one = await respond(site, input=[item(FUNCTION, LATE), user("Hi")])
    two = await respond(site, input=[user("More")], previous_response_id=one["id"])
    assert site.prompt().startswith(site.prompt(0))
    assert two["id"].rpartition("_")[0] == one["id"].rpartition("_")[0]
    says(site, ("mail__send", "{}"))
    (call,) = (await respond(site, input=[user("Send")], previous_response_id=two["id"]))["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mail", "send")


@served()
async def test_a_follow_up_with_more_tools_goes_on_and_one_with_fewer_forks(site: Site) -> None:
    more = {"type": "function", "name": "more", "parameters": {"type": "object"}}
    one = await respond(site, input=[user("Hi")], tools=[FUNCTION])
    two = await respond(site, input=[user("Next")], previous_response_id=one["id"], tools=[more, FUNCTION])
    assert site.prompt().startswith(site.prompt(0))
    assert site.prompt().index('"more"') > site.prompt().index("Next")
    fewer = await respond(site, input=[user("Last")], previous_response_id=two["id"], tools=[FUNCTION])
    assert '"more"' not in site.prompt()
    sessions = [made["id"].rpartition("_")[0] for made in (one, two, fewer)]
    assert sessions[0] == sessions[1] != sessions[2]


@served()
async def test_tools_that_come_later_leave_the_prompt_before_them(site: Site) -> None:
    past = [user("Hi"), {"role": "assistant", "content": "Hello"}]
    await respond(site, input=[*past, user("Next")], tools=[FUNCTION], store=False)
    front = site.prompt().partition("Next")[0]
    says(site, ("mail__send", '{"to": "me"}'))
    later = [*past, item(LATE), user("Next")]
    made = await respond(site, input=later, tools=[FUNCTION], store=False)
    assert site.prompt().startswith(front.rpartition("<|im_start|>")[0])
    assert site.prompt().count('"mail__send"') == 1
    assert site.prompt().index('"mail__send"') > site.prompt().index("Hello")
    (call,) = made["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("mail", "send", '{"to": "me"}')
    choice = {"type": "function", "name": "send", "namespace": "mail"}
    await respond(site, input=later, tools=[FUNCTION], store=False, tool_choice=choice)
    assert "mail__send" in (site.engine.submitted[-1].grammar or "")


@served()
async def test_a_search_finds_tools_that_can_be_called(site: Site) -> None:
    search = {"type": "tool_search", "execution": "client"}
    says(site, ("tool_search", '{"query": "mail"}'))
    one = await respond(site, input=[user("Find mail")], tools=[search], store=False)
    (call,) = one["output"]
    found = {
        "type": "tool_search_output",
        "call_id": call["call_id"],
        "execution": "client",
        "status": "completed",
        "tools": [LATE],
    }
    says(site, ("mail__send", "{}"))
    two = await respond(site, input=[user("Find mail"), call, found], tools=[search], store=False)
    assert site.prompt().startswith(site.prompt(0))
    assert (two["output"][0]["namespace"], two["output"][0]["name"]) == ("mail", "send")
    again = [user("Find mail"), call, found, *two["output"]]
    output = {"type": "function_call_output", "call_id": two["output"][0]["call_id"], "output": "Sent."}
    await respond(site, input=[*again, output], tools=[search], store=False)
    assert site.prompt().startswith(site.prompt(1))


@served()
async def test_what_was_added_is_listed(site: Site) -> None:
    one = await respond(site, input=[item(LATE), user("Hi"), item(FUNCTION)])
    listed = (await site.http.get(f"/v1/responses/{one['id']}/input_items?order=asc")).json()
    assert not faults("ResponseItemList", listed)
    assert [given["type"] for given in listed["data"]] == ["additional_tools", "message", "additional_tools"]
    assert listed["data"][0]["tools"][0]["tools"][0]["name"] == "send"
    conversation = "conv_" + one["id"].removeprefix("resp_").rpartition("_")[0]
    answer = await site.http.get(f"/v1/conversations/{conversation}/items")
    assert answer.status_code == 404  # a chain is no conversation
    made = (await site.http.post("/v1/conversations", json={"items": [item(LATE), user("Hi")]})).json()
    items = (await site.http.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()
    assert not faults("ConversationItemList", items)
    assert [given["type"] for given in items["data"]] == ["additional_tools", "message"]
    await respond(site, conversation=made["id"], input="Go")
    assert "mail__send" in site.prompt()
