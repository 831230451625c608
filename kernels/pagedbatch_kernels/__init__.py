"""Paged attention kernels: one small interface, one module per backend.

A backend is a module with the functions of `interface.Backend`: `reference` (plain torch, the oracle and the fallback).
Importing this package imports neither torch nor triton.
"""
