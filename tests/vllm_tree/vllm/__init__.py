"""A stand-in for vLLM in the shapes that its agent relies on: the engine's loop, its executors, the workers, how they load plugins.

Names, signatures and the order of things are those of vLLM 0.26; what runs on a GPU there, here touches a simulated one.
"""
