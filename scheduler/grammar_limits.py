"""How far a grammar may go, in both processes: the server checks with the limits that the engine compiles with."""

# Of llguidance, by its own names. What costs memory or time in every step is kept low; a long list of optional
# properties needs many items.
GRAMMAR_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_items_in_row": 10_000,
    "step_max_items": 200_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 500_000,
}
GRAMMAR_STACK = 256 << 20  # bytes of address space for a thread that compiles: it recurses once per nested rule
