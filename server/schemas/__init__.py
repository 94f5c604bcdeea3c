"""Schemas: requests and answers in OpenAI's format, which all other APIs are translated to.

Owns: strict parsing of fields, messages, tools, response formats; items of responses and
conversations.

May import: ``server.log``, ``server.constraints``.

Never knows: routes, engines, how a prompt is rendered.
"""
