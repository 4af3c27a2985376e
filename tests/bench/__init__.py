"""Measurements that need a part which no user has; run by hand, no part of the suite."""
