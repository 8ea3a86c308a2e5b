"""GPU kernels in Triton, one module per op; a module is imported when its op first runs, because triton is optional."""
