"""Triton operators, one a file: the reference in torch, the kernel, the launcher. Read gumbel.py first.

The folder is installed as `pad_engine.kernels`: the top-level import name `kernels` belongs to another project.
"""
