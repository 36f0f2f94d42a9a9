"""The HTTP side of the server. It has the options, the gate, errors, streams, logs, metrics, and
the server process."""
