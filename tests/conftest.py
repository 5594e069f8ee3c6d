"""What holds for every test.

Hypothesis has no deadline: tests assert no times, and a busy machine is no bug. Where `CI` is set the examples are the
same on every run, so that a change is judged by itself; elsewhere they are new each time, so that the search goes on.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("search"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "search")
