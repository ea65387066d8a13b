"""The native CPU kernels: one `forward` per step over quantised weights and a paged half-precision cache.

Built by `python -m services.replica.model.native` where a C++ compiler is, once per instruction set; the best one that
this processor can run is loaded. Where there is none, the plain-torch runner takes its place and says so.
"""
