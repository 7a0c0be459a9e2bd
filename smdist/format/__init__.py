"""What is stored and what travels in the journal, as typed data. Pure: nothing here does I/O.

journal_records   what the training process appends to its journal
fold              journal records -> blocks (one step of one rank, or a piece of it)
segment, block    blocks <-> the bytes of a safetensors object
layout, dtypes    where each tensor of a block lies, and its element type
manifest          the JSON objects of a run and their keys
manifest_spans    which manifests travel together in one object
inline_segment    a small segment inside its manifest
session_checks    does an object belong to the session that its key promises?
stored_json       JSON objects with a checksum of content and key
intervals         sets of integers as ranges
"""

from __future__ import annotations
