"""Draft of a workload for a model: ``probe`` tries the model, ``text`` writes the file.

One forward on this process shows which arguments the model takes, which output depends
on the parameters, and which blocks it calls. The draft is then checked like every
workload before its first run; what these checks reject becomes a TODO in the file.
"""
