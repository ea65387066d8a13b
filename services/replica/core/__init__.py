"""The engine's decisions, pure: which sequence computes how many tokens in the next step, in which blocks, and what
text the sampled tokens release. No torch, no clock, no I/O: the simulator runs this very code.
"""
