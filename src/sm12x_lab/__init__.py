"""Run, check and prove code for NVIDIA SM12x GPUs where there is none: on a Hopper GPU and on a CPU."""
