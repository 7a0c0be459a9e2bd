"""Public names under the paths that scripts written for smdebug import them by."""
