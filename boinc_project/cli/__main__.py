"""`python -m boinc_project.cli`: the `boinc-train` command without its installed script."""

from boinc_project.cli import main

if __name__ == "__main__":
    main()
