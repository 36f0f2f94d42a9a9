"""EESD side by side with other runtimes: convert a checkpoint for each, run them in turn in
processes of their own, report."""
