"""The command line ``onediff-ext``: one module for each command; torch is loaded only by run."""
