"""Drives prefill and decode engines as one: a backend of the HTTP application. No torch."""
