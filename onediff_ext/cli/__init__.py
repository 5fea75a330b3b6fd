"""The command line ``onediff-ext``; each command is a module that loads torch only when it runs."""
