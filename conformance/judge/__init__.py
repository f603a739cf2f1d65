"""After the run: laws, references, bounds and parity; pure functions of traces.

- A law reads ``Evidence`` and returns a ``Finding``; one file of ``laws`` is a chapter.
- A reference is trained on one process in fp64 and follows the steps that the *rule*
  skips. Other correct runs of it differ in rounding alone: how far they are from it is
  the noise, and a bound is a multiple of the noise.
- Training that is not plain is compared with itself on one rank (``one_rank``).
- A doubt says from when on, and for which parameters, a reference may rightly differ; a
  departure under a doubt is inconclusive, in every law.
- What was not compared is counted, and a law that compared too little has no verdict.
- Diagnosis (``localise``, ``boundaries``, ``diagnosis``) comes after the verdicts and
  changes none.
"""
