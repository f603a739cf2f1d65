"""Sources of noise: permitted differences between correct runs, one file each.

A reference run has a list of perturbations (``variants.py``). To add a source of noise,
write a file with a :class:`Perturbation`, and add it to a variant. The file documents
what the noise models and how large it is.
"""
