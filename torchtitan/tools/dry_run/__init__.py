"""Estimates each rank's memory and traffic by a step with fake tensors; cuts a pipeline to a rank's memory."""
