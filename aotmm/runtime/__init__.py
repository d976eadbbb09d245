"""Load packs and launch their kernels: load -> select -> launch. Needs neither Triton nor a compiler."""
