"""What the script of a WebUI calls; nothing here is imported by the command line."""
