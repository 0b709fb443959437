"""Attention backends. They never import one another."""
