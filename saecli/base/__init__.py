"""Errors, files, home, console, options, devices, processes."""
