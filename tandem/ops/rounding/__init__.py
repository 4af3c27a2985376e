"""Stochastic rounding of state that rests in 16 bits.

A recurrent state is rounded at every token. To the nearest, a small decay or a small addition can
be lost again and again; at random, with the probability that keeps the mean, errors cancel. The
random bits depend on a seed, on how many tokens the sequence has and on the place in the state: not
on slot, batch or engine, so that a sequence that is moved or batched otherwise meets the same ones.
"""

from tandem.ops.rounding.reference import Rounding, round_state, to_rest

__all__ = ["Rounding", "round_state", "to_rest"]
