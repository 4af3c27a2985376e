"""Measures speed beside its limit. Never asserted in a test."""
