"""The OpenAI-compatible HTTP application, written once for one engine and for a pair. No torch."""
