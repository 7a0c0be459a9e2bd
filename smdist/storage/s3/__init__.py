"""S3 and servers that speak it. `store.py` implements the contract of `smdist/storage/store.py`.

store, multipart, request_body     objects in and out
connection, client, client_handle  one aiobotocore client and its event loop
errors                             which answers are retried, and what each error says
options, pinned_url                settings in the URL and from the environment
write_probe                        the check when a hook is constructed
"""

from __future__ import annotations
