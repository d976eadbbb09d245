"""Packs: schema and manifest, files, tuning tables, and verification without running anything."""
