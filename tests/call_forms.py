"""Ways in which models write calls of tools."""

from server.chat.call_form import CallForm, ParameterForm

ARRAY = CallForm("[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", ", ", "]")
BARE = CallForm("", '{"name": "', '", "parameters": ', "}", several=False)
NAMED = CallForm("<calls>", "<call>function<sep>", "\n```json\n", "\n```</call>", "\n", "</calls>")
XML = CallForm(
    "",
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    "\n",
    parameter=ParameterForm("<parameter=", ">\n", "\n</parameter>\n"),
)
