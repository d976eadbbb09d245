"""`aotmm bench`: measurements on the GPU that is there. What is timed is checked first."""
