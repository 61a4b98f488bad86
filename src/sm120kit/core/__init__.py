"""Modules that all packages use: errors, messages, processes, compilers, memory, and the state directory."""
