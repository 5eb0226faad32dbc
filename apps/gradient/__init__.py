"""The `gradient` application: runs one microtask under the BOINC API."""
