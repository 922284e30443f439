"""The compiled kernels: arrays in, ``out`` filled, nothing else.

A kernel checks nothing, allocates nothing that grows with the data and touches no Python object. All arrays are
C-contiguous. 16-bit floats come as integers of the same width: ``uint16`` carries float16, ``int16`` bfloat16.
"""
