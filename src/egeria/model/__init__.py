"""The user's model: how it is cut into layer modules, and how the front of these is frozen."""
