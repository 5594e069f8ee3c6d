"""Stores moved between this broker's layout and Apache RocketMQ's 4.9, offline and in both directions.

The records of the commit log are the same, bit for bit, and go over as they are. What differs is around them: Apache's
last file is filled up with zeros, its tables lie in `config/` with integers as keys of objects, and it keeps two things
in tables that this broker keeps in its log, how far delayed messages are delivered and which transactions have ended.
What follows from the log (consume queues, index) is not carried over: each broker makes it of the log when it first
starts.

    importing.py, exporting.py   the two commands
    log_files.py                 reading the files of a log record by record, and writing them
    inventory.py                 what a log holds, as its records go by
    tables.py                    Apache's tables as JSON
    apache_queues.py             how far its consume queues go
    recognition.py               telling Apache's store from one of ours, also for a broker that is to start on it
    staging.py                   the target's directory, which is there whole or not at all; locks
"""
