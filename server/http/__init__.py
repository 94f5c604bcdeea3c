"""HTTP: connections, bodies, errors, streams.

Owns: reading requests within limits, errors as answers, server-sent events, the page's files.

May import: everything below: ``server.engine``, ``server.log``, ``server.chat`` for their
exceptions.

Never knows: endpoints.
"""
