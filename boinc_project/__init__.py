"""BOINC's files, protocol and database, and the `boinc-train` command: what all other folders share."""

__version__ = "0.1.0"
