"""Grammar-constrained output and tool calls."""
