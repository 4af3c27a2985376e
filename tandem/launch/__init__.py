"""Starts and supervises the processes that a command needs: engines, pairs, routers, the demo."""
