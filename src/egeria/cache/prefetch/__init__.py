"""Reading ahead of the training loop and writing behind it: a pure plan, and threads that carry it
out.
"""
