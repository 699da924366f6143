"""Drills inside pytest: what the fixture `chaos` hands to a test. `integrations.pytest_plugin` is what pytest sees of it.

Imported when a test asks for the fixture; what is heavy, when the first drill runs.
"""

from chaosrun.integrations.testing.drills import Chaos, Plan
from chaosrun.integrations.testing.outcome import DrillFailed, Outcome

__all__ = ["Chaos", "DrillFailed", "Outcome", "Plan"]
