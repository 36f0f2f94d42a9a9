"""The playground: a page that shows what drafting does."""
