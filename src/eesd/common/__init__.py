"""Modules that all rooms share: errors, files, the manifest, machine probes, common parts of the
commands. They import no other room."""
