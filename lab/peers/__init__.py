"""EESD side by side with other runtimes: convert a checkpoint for each, run each in turn in a
separate process, report."""
