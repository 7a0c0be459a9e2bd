"""Capture in the training process: tensors in, journalled bytes out. Framework-neutral.

capture                     the interface that a hook calls
record_log, reentrancy      operations in order, repaired after interruptions
part_saver, tensor_copier   how a part is copied and recorded
room_policy                 waiting for room, and dropping
part_plan, tensor_access    the layout of a part, and how tensors are read
buffer, arena               bounded warm memory, and which of it is in use
journal_room                appends records within the limits; deferred_records keeps the rest
device_commits, prefaulter  work on background threads
"""

from __future__ import annotations
