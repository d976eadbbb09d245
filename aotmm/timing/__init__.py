"""The shared part of tuning and benchmarks: problems, operands, graph timing, and the definition of a right product."""
