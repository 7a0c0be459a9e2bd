"""Follow runs in a store and keep their snapshots up to date. Needs no Ray.

directory_watcher    all runs below a directory, one task each
run_watcher          one run: poll, publish, answer; made of the next three
run_follower         read new facts of a run into a view
publisher            write snapshots: lease, packing, cleanup
run_queries          status, missing ranks, wait for a step
store_poller         what is new in the store; rank_reader reads one rank
poll_schedule        when to read which rank, and the policy for merging once
sharding             polling by several processes
leadership, lease    one writer at a time
snapshot_cleanup     remove what no reader needs
hint_server          hints of uploaders: read this rank now
merge_once           one cycle without staying: `smdist merge`, the last uploader
"""

from __future__ import annotations
