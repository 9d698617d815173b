"""The options of calls: their table, checks and types."""
