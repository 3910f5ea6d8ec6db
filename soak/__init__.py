"""Random small trainings with random faults, each compared bit for bit with the same training made by hand.

`cases`: what is drawn. `training`: the loop, and egeria in it. `by_hand`: the same loop freezing what the journal says.
`trials`: the faults, and what must hold. `frameworks`: Trainer and Lightning. `__main__`: the command `scripts/soak`.
"""
