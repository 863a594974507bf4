"""Settings of all unit tests: hypothesis has no time limits, and imports of unused packages are prevented."""

from hypothesis import settings

from stages.models.start_up import hide_unused_packages

# The first example pays for imports, and the machine may be busy: how long one takes is not what is tested.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Before test modules import models: this saves each worker seconds, as it does a stage.
hide_unused_packages()
