"""Loads packs and launches their kernels: load -> select -> launch. Needs neither Triton nor a compiler."""
