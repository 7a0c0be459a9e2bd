"""The uploader process: from the journal to the store.

    training process                     uploader process
    ----------------                     ------------------------------------------------------------
    process.Supervisor --- starts --->   entry_point.main      lock, signals, exit code
                                           uploader.Uploader   open store, join, resume, finish
                                             upload_loop       from the first record to the last
    journal, arenas (spool/) ------->        intake            journal records, as they come
                                             batching          when to write, and how much at once
                                             batch             records -> a segment and a manifest
                                             commit            put segment, put manifest, acknowledge
    acknowledgement page <---------------------+
                                             summaries         many manifests in one object
                                             manifest_spans
                                             hint_sender       notify a coordinator
                                             final_merge       the last uploader of a run merges it

retry (repeat every store operation until it succeeds) and run_guard (is the run of this rank still at its
place?) are used by all of these. `recover` does the same work for what a dead job left behind.
"""

from __future__ import annotations
