"""Triton kernels of our own for the groups of operators that the rewriter fuses; tests run them in its interpreter.

Importing this package imports no Triton; each kernel's file does.
"""
