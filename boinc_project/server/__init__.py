"""The embedded BOINC-compatible server: pure decisions and a thin HTTP rim around them."""
