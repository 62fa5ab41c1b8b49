"""Scores of a model in its layout: tasks of lm-evaluation-harness, and answers before and after a run."""
