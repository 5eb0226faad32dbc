"""Calibration: how far apart honest copies of a job's results are, measured before volunteers compute any.

    replicas.py   ways to compute the same microtask: real backends, reordered sums, and too little precision
    workbench.py  the job's own microtasks on a replica, in this process, and their updates as the validator reads them
    spread.py     from distances to noise tensors, a tolerance and the largest number of local steps (pure)
    measure.py    all of it together: a Calibration
    record.py     calibration.json, what it is bound to, and what `job create` makes of it (pure)

A composition root like the command line: it needs the generator's export, the application's runner and the
validator's distance.
"""
