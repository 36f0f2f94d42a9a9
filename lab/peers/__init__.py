"""Compares EESD with other runtimes. The tools convert a checkpoint for each runtime, run the
runtimes in turn in separate processes, and write a report."""
