"""EESD side by side with other runtimes: convert a checkpoint for each runtime, run each in turn in
a separate process, report."""
