"""Saving and loading parallel models."""
