"""What the training process and its uploader share: a private folder on this machine.

spool           the folder: how it is created, locked, found and removed
journal         records of captures, in order
ack_page        which records are stored
private_files   opens only files that this user alone can write
logs            the logger, which escapes control characters
"""

from __future__ import annotations
