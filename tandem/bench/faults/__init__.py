"""`tandem bench faults`: real engines, broken on purpose while requests with known answers run."""
