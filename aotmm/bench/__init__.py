"""`aotmm bench`: measurements on this machine's GPU. Every product is checked before it is timed."""
