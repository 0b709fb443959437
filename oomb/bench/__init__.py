"""Measurements behind the published numbers."""
