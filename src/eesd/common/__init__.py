"""Shared leaves: errors, files, the manifest, machine probes, the common parts of the commands.
Imports no other room."""
