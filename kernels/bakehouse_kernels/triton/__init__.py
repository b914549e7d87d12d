"""The GPU path: Triton kernels, one operation a file. Imports triton, so only where a GPU path is taken."""
