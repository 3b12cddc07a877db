"""Everything that crosses a process boundary: HTTP messages, helper verbs, files of a job."""

# The limit page in the directory of a lease; the device helper removes it when the lease ends.
LIMIT_NAME = "limit"
