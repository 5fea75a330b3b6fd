"""The extension inside a WebUI: its scripts, settings, REST routes and X/Y/Z axes."""
