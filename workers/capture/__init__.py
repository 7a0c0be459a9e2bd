"""The training process: tensors in, journalled bytes out. Framework-neutral.

part_plan        where each tensor of a part goes
tensor_access    what a framework's tensors must answer
capture          steps, copies and records, in order
buffer, arena    bounded warm memory, and which of it is in use
journal_room     records into the journal, room or no room
background_thread, deferred, warmer    work beside the training thread
"""

from __future__ import annotations
