"""Measurement of the shipped kernels: which shapes, and what their times say."""
