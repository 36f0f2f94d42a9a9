"""Controllers replayed on recorded traces: no engine runs, and any cost model applies."""
