"""HTTP: options, the gate, errors, streams, logs and metrics, and the server as a process."""
