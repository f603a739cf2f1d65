"""Record a training job as it is, compare two recordings, watch a job in production.

``recorder`` runs inside the job and keeps numbers that can be summed over ranks.
``compare`` reads two recordings and reports how they differ. ``watch`` compares ranks
of a running job and needs no recording. This package does not import the comparison
of workloads.
"""
