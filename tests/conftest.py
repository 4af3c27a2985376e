"""Settings of all tests."""

from hypothesis import settings

# Times vary on shared machines; pytest-timeout catches what hangs.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
