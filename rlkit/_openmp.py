"""Must be imported before torch: threads of its OpenMP library sleep while they wait, instead of spinning.

On a machine that others use too, spinning threads wait for each other's time slices: one RLOO step of the tiny model
took 8.9 s instead of 0.9 s with two threads on two busy cores (docs/decisions.md). A value that the user has set stays.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
