"""Statistics, Markdown tables and plots, made from the JSON files of measurements and replays."""
