"""Measurement of the shipped kernels: shapes, times, and the models fitted to them."""
