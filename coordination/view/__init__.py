"""The merged view of a run: which ranks have which steps, and who is missing why. Pure.

run_view       folds sessions, manifests and heartbeats, in any order
membership     who is expected, active, lagging, ended, lost
step_facts     the rule that a step is complete
step_index     steps as they change while a run is followed
read_cursor    how far the manifests of a rank were read
span_reader    reads the manifests that pile up, by spans
"""

from __future__ import annotations
