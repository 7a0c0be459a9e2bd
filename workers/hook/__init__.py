"""The framework-neutral part of a hook: which step it is, what is due, where captures go.

base, accessors      what every hook offers
step_clock           counts steps by mode
recorder             names and plans tensors, hands them to the capture
capture_session      opens and closes spool, capture and uploader
error_policy         `on_error`: what happens when smdist itself fails
overhead_budget      `overhead_budget`: save less when capture costs too much
buffer_location      size and place of the capture buffer
user_values          save_scalar, save_tensor
"""

from __future__ import annotations
