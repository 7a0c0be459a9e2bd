"""How a process finds out who it is and joins a run. Used on both sides of the spool.

rank, tf_config      rank and world size, from the launcher's environment
launcher_identity    which invocation of a launcher started this process
attempt              the number of this start of the job
enrol                run.json and the session of this rank, in the store
"""

from __future__ import annotations
