"""A discrete-event simulator: a real project in virtual time, and hosts that are made up.

Real: the work generator, validator and assimilator, the embedded server's scheduler, transitioner and file deleter,
over a private database and project tree; every update, computed by the application's own runner. They are the
objects that the daemons run, called pass by pass, and they ask boinc_project.clock what time it is.
Made up: the hosts' speed, lines, availability and lies, and how long things take them. Nothing is sent over HTTP:
a request is the record that the scheduler reads from a client's XML, and an upload is written as the upload handler
writes it.

    events.py     what happens when: a heap of virtual moments
    hosts.py      what a host is like; departures
    traces.py     hosts from public availability traces; synthetic.py: hosts drawn from stated distributions
    station.py    a host's processors and lines: one thing after another, standing still while the host is off
    client.py     the stock client's habits: when it asks, how long it backs off, when it reports
    computing.py  honest updates, one computation for all copies of a microtask
    lies.py       what liars give back instead
    project.py    the private project and its daemons
    simulation.py all of it together
    report.py     what came of it

It is a composition root, as the command line is: it may import every station.
"""
