"""Build wheels: FlashInfer with compiled kernels, and the repacked upstream wheels of engines.

:mod:`sm120kit.wheels.pipeline` runs the stages; the other modules are what it is made of. Everything is compiled in one work
directory per recipe and arch list, which stays between builds so that ninja's dependency files avoid compiling again. Commands
in it use relative paths, so that the same inputs give the same bytes in every directory.
"""
