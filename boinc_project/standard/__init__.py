"""Our part in a project of a standard BOINC server: installing, removing and checking it."""
