# SPDX-License-Identifier: Apache-2.0
"""The named workloads, for scripts beside this one. Run it to list them.

The table itself ships with the package (cuattn/_bench/families.py), so that `python -m cuattn
bench` has it too.
"""

from cuattn._bench.families import FAMILIES, Family
from cuattn._bench.runner import list_families
from cuattn._bench.workloads import Workload, dense

__all__ = ["FAMILIES", "Family", "Workload", "dense"]

if __name__ == "__main__":
    list_families()
