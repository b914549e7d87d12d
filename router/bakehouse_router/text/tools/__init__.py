"""How models write tool calls: one format per file, and the grammars that force them."""
