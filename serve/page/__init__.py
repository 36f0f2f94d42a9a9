"""The playground: a page that visualizes drafting."""
