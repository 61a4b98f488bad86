"""Determine which CTA tiles an engine instantiates and which fit SM12x, with the engine's own templates in the host compiler.

The engine's generators list the launcher calls. Each call is compiled in the engine's own launcher (no nvcc, no GPU) up to the
kernel type, which reports its pipeline stages and shared memory. No formula of CUTLASS is repeated in this package.
"""
