"""Settings of all unit tests."""

from hypothesis import settings

# The first example pays for imports, and the machine may be busy: how long one takes is not what is tested.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
