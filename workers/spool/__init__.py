"""What the training process and its uploader share: a private folder on this machine.

spool           the folder, who may use it, how it is found and removed
journal         records of what was captured, in order
ack_page        how far the store has it
private_files   opens only what this user owns and nobody else can write
logs            what is logged cannot steer a terminal
"""

from __future__ import annotations
