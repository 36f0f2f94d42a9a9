"""Modules that all other packages share. They cover errors, files, the manifest, machine probes,
and the common parts of the commands. They import none of those packages."""
