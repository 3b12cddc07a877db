"""Everything that crosses a process boundary: HTTP messages, helper verbs, files of a job."""
