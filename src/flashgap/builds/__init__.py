"""Builds: from a specification to a model ready to run."""
