"""Slow ranks on a fast network, on which cutting pays at the sizes of tests too, and a short search.

Templates are not priced beside it: each has tests of its own.
"""

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link

CLUSTER = st.Cluster(
    "slow ranks",
    Device("slow", "cpu", (("float64", 1e8), ("float32", 1e8)), 2**34, 1e10),
    ((None, Link(1e-9, 1e11)),),
)
SOLVER = st.SolverOptions(time_limit_s=5, patience_s=0.5, yardsticks=False)
