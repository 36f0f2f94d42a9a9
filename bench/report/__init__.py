"""Statistics and Markdown tables, made from the JSON files of measurements and replays."""
