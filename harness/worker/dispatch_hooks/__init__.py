"""Dispatcher hooks: notify observers of every operator that a rank executes, on every device and in compiled code.

Importing a module of this package installs its hooks, once per process.
"""
