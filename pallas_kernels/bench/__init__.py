"""`python -m pallas_kernels.bench`: how fast are the kernels on this device, and against what?"""
