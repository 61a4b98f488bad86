"""Hosts: facts about a machine, doctor's findings on it, and rules that explain errors in engine logs."""
