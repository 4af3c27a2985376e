"""Runs steps on one rank: memory, inputs, model, sampler. No scheduling decisions."""
