"""Many requests at once: throughput and latency by concurrency, EESD beside other runtimes that batch."""
