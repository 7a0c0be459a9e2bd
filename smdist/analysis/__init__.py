"""The path from which scripts written for smdebug import `no_refresh`."""
