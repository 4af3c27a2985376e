"""Where state lies: which request owns which pages and which slot. No torch, no transport."""
