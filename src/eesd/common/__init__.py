"""Modules that all other packages share: errors, files, the manifest, machine probes, common parts
of the commands. They import none of those packages."""
