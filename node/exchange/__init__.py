"""Moves stores between this broker's layout and that of Apache RocketMQ 4.9, offline and in both directions.

The records of the commit log are the same, bit for bit, and are copied as they are. What differs is around them:
Apache's last file is filled up with zeros, its tables are in `config/` with integers as keys of objects, and it keeps
two things in tables that this broker keeps in its log, how far delayed messages are delivered and which transactions
have ended. What is derived from the log (consume queues, index) is not copied: each broker rebuilds it when it first
starts.

    importing.py, exporting.py   the two commands
    log_files.py                 reading the files of a log record by record, and writing them
    inventory.py                 what a log holds, counted while its records are read
    tables.py                    Apache's tables as JSON
    apache_queues.py             the ends of its consume queues
    recognition.py               tells Apache's store from one of ours, also when a broker starts on it
    staging.py                   the target directory, which appears complete or not at all; locks
"""
