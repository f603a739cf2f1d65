"""Sources of noise: permitted differences between correct runs, one file each.

A reference run has a list of perturbations (``variants.py``). To add a source of noise,
write a file with a :class:`Perturbation` that documents what it models and how large it
is, and add it to a variant.
"""
