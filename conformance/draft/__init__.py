"""A first workload for a model: ``probe`` tries the model, ``text`` writes the file.

Nothing is guessed that one forward on this process can show: which arguments the model
takes, which of its outputs depends on the parameters, which blocks it calls. The checks
that ``gradparity run`` makes before its first run also run on the draft; a refusal
becomes a TODO in the file.
"""
