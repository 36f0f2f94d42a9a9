"""Build for the CPU. A build has packed weights, and graphs of this project's operators."""
