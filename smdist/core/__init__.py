"""Public names under the paths that smdebug scripts import."""
