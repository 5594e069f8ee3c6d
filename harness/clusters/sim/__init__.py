"""The `sim` cluster: hosts, network, disks and clocks in one process, on virtual time, decided by a seed.

    simulation.py  runs a coroutine in simulation
    errors.py      what goes wrong with a simulation itself
    lane.py        what one simulated process schedules; held back while paused, dropped when dead
    loop.py        the event loop: virtual time, no threads, no sockets, an order that the seed decides
    primitives.py  its timers, futures and tasks
    refusals.py    event loop methods that it refuses
    network.py     hosts joined by links, connections between them, cuts and other faults
    link.py        how long a segment takes from one host to another
    wire.py        one direction of a connection: order, retransmission, window
    transport.py, server.py    what programs see of connections
    disk.py        the files of a host, the time they take, and what a power cut leaves of them
    inode.py       a file's content in the page cache, and how much of it is durable
    process_disk.py    the disk as one process uses it
    clock.py       wall and monotonic clocks that can be wrong
    host.py        a host: kill, pause, power failure, restart
    logs.py        what programs log, by host
    guard.py       raises when simulated code tries to touch the real world

The code that runs here is the node's own. It knows nothing of simulation: it asks the running loop for time
and connections and its runtime for files and randomness.
"""
