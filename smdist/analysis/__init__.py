"""Where scripts written for smdebug look for `no_refresh`."""
