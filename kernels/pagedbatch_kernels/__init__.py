"""Paged attention kernels behind one small interface, `interface.Backend`: `reference` (torch, the oracle and the
fallback), `cpu.backend` (C++) and `triton_backend`. Also gemm, norms, RoPE and sampling for CPUs, in `cpu`.

Importing this package imports neither torch nor triton.
"""
