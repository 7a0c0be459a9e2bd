"""From journal records to stored objects. Pure: nothing here reads or writes anything.

The uploader calls, in this order, for every batch: `Pending.add`, `decide`, `Pending.take`, `fold`,
`compose`. The reader of a run calls what is in `block`.
"""

from __future__ import annotations
