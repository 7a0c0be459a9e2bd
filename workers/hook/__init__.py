"""The framework-neutral part of a hook: which step it is, what is due, where captures go.

base, accessors      what a script can call on every hook
core, step_listener  the course of a step, and what an adapter does in it
lifecycle            the open hooks of the process: exit and forks
plan_warnings        warnings about collections that save nothing
step_clock           counts steps by mode
recorder             names and plans tensors, hands them to the capture
capture_session      opens and closes spool, capture and uploader
drain_progress       waits for the uploader at the end
process_settings     rank, world size, attempt, spool directory
error_policy         `on_error`: what happens when smdist itself fails
overhead_budget      `overhead_budget`: save less when captures cost too much
buffer_location      size and place of the capture buffer
user_values          save_scalar, save_tensor
"""

from __future__ import annotations
