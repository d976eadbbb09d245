"""Measurements on the GPU that is there: `python -m aotmm.bench`. Results are checked before they are timed."""
