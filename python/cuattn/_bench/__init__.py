# SPDX-License-Identifier: Apache-2.0
"""The benchmark behind ``python -m cuattn bench``: workloads, peers, timing, report.

Nothing here is imported by ``import cuattn``; torch and other peers are imported when a run needs
them.
"""
