"""The models of one server: which are loaded, which is next, and the engine process of each.

Owns: names of models, loading and unloading, the limits on both, what a request's model is.

May import: ``server.turns`` and what that may.

Never knows: the shapes of any API's requests and replies.
"""
