"""Surveys: what other people's packages train, judged model by model."""
