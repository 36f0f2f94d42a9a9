"""Output by a grammar: constraints, and the calls of tools."""
