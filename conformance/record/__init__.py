"""Record a training job as it is, and compare two recordings; watch one in production.

``recorder`` runs inside of the job and keeps numbers that can be summed over ranks;
``compare`` reads two recordings and decides. ``watch`` needs no recording. Nothing here
imports the comparison of workloads.
"""
