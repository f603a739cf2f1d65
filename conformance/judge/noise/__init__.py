"""Noise: allowed differences of two right runs, one file for each source.

A reference run has a list of perturbations (``variants.py``). To add a source, write a
file with a :class:`Perturbation` that says what it models and how large it is, and name
it in a variant.
"""
