"""Analyse device code: which tiles SM12x can launch, and the cubins in a file."""
