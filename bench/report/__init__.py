"""Statistics and Markdown tables. They are made from the JSON files of measurements and replays."""
