"""Worlds on several hosts: each process of torchrun is the agent of one rank."""
