"""What a pack is: its schema and manifest, its files, tuning tables, and how a pack is verified without running it."""
