"""An engine: its core process, its ranks, its frontends (client, offline API) and its outputs."""
