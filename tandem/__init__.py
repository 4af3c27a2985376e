"""Tandem: serving of models that mix recurrent layers with attention, prefill and decode apart."""
