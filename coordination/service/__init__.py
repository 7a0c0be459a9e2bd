"""Follow runs in a store and keep their snapshots up to date. Needs no Ray.

directory_watcher    many runs below one place
run_watcher          one run: poll, merge, publish
store_poller, poll_schedule    what is new in the store, and when to look
sharding             polling split over several processes
leadership, lease    one writer at a time
snapshot_cleanup     removes what no reader needs
hint_server          uploaders say "look now"
merge_once           one cycle without staying: `smdist merge`, the last uploader
"""

from __future__ import annotations
