"""The uploader process: from the journal to the store.

process       started and restarted by the training process
uploader      its life: join the run, resume, loop, finish
intake        journal records, as they come
batching      when to write, and how much at once
batch         records -> a segment and a manifest
commit        put the segment, then the manifest, then acknowledge
retry         every store operation is repeated until it succeeds
run_guard     is the run of this rank still at its place?
summaries, manifest_spans    many manifests in one object
final_merge   the last uploader of a run merges it
recover       the same work for what a dead job left behind
"""

from __future__ import annotations
